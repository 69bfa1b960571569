"""Machines as folder trees: the files that each vendor's driver, device nodes and builds leave on a
system. Tests combine them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sglcore.device.system import System

Files = Mapping[str, str]
"""Texts by absolute path."""


def machine(root: Path, *parts: Files, environ: Mapping[str, str] | None = None) -> System:
    """Make a machine with all of these files below `root`."""
    for name, text in (item for part in parts for item in part.items()):
        file = root / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return System(root, environ or {})


def pci(address: str, vendor: int, device: int, pci_class: int) -> Files:
    """A device on the PCI bus; `pci_class` has 16 bits, without the programming interface, as
    `lspci` prints it."""
    folder = f"/sys/bus/pci/devices/{address}"
    return {
        f"{folder}/vendor": f"{vendor:#06x}\n",
        f"{folder}/device": f"{device:#06x}\n",
        f"{folder}/class": f"{pci_class << 8:#08x}\n",
    }


def torch_build(version: str, **built_for: str) -> Files:
    """An installed torch, given by its version file."""
    names = ("cuda", "hip", "xpu")
    lines = [f"__version__ = {version!r}", "debug = False"]
    lines += [f"{name}: Optional[str] = {built_for.get(name)!r}" for name in names]
    return {
        "/site-packages/torch/version.py": "\n".join(lines),
        "/site-packages/torch/__init__.py": "raise RuntimeError",
    }


def module(name: str) -> Files:
    """A Python module that raises when it is imported, because probes must not import."""
    return {f"/site-packages/{name}/__init__.py": "raise RuntimeError('imported by a probe')"}


CPU_TORCH = torch_build("2.13.0+cpu")
CUDA_TORCH = torch_build("2.13.0+cu130", cuda="13.0")
HIP_TORCH = torch_build("2.13.0+rocm7.1", hip="7.1.52802")

NVIDIA_NODES = {"/dev/nvidia0": "", "/dev/nvidiactl": "", "/dev/nvidia-uvm": "", "/dev/nvidia-modeset": ""}
NVIDIA_PCI = pci("0000:01:00.0", 0x10DE, 0x2335, 0x0302)
NVIDIA_LIBRARY = {"/usr/lib/x86_64-linux-gnu/libcuda.so.1": ""}
NVIDIA_VERSION = {
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
    "/proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ:   \t\t 255\n",
}
NVIDIA = {**NVIDIA_NODES, **NVIDIA_PCI, **NVIDIA_LIBRARY, **NVIDIA_VERSION}
"""A server with one GPU and its driver."""

KFD = "/sys/class/kfd/kfd/topology/nodes"


def kfd_node(number: int, **values: int) -> Files:
    """A node of the compute driver's topology."""
    return {f"{KFD}/{number}/properties": "".join(f"{name} {value}\n" for name, value in values.items())}


AMD_NODES = {"/dev/kfd": "", "/dev/dri/renderD128": "", "/dev/dri/card0": ""}
AMD_PROCESSOR = kfd_node(0, cpu_cores_count=96, simd_count=0, gfx_target_version=0)
AMD_MI300X = kfd_node(1, simd_count=1216, simd_per_cu=4, gfx_target_version=90402, wave_front_size=64, vendor_id=4098)
AMD_RADEON = kfd_node(1, simd_count=192, simd_per_cu=2, gfx_target_version=110000, wave_front_size=32, vendor_id=4098)
AMD_GRAPHICS = kfd_node(1, simd_count=4, simd_per_cu=2, gfx_target_version=100306, wave_front_size=32, vendor_id=4098)
"""The integrated graphics of a desktop processor, with two compute units."""
AMD_GRAPHICS_PCI = pci("0000:0e:00.0", 0x1002, 0x164E, 0x0300)
AMD_PCI = pci("0000:05:00.0", 0x1002, 0x74A1, 0x1200)
ROCM = {"/opt/rocm/lib/libamdhip64.so.7": "", "/opt/rocm/lib/libhsa-runtime64.so.1": ""}
AMD = {**AMD_NODES, **AMD_PROCESSOR, **AMD_MI300X, **AMD_PCI, **ROCM}
"""A server with one GPU, its driver and ROCm."""

XPU_TORCH = torch_build("2.13.0+xpu", xpu="20250302")


def drm_node(number: int, driver: str, pci_id: str, address: str) -> Files:
    """A render node, and the kernel's description of its device."""
    text = f"DRIVER={driver}\nPCI_ID={pci_id}\nPCI_SLOT_NAME={address}\n"
    return {f"/dev/dri/renderD{number}": "", f"/sys/class/drm/renderD{number}/device/uevent": text}


INTEL_PCI = pci("0000:03:00.0", 0x8086, 0xE20B, 0x0300)
INTEL_LIBRARIES = {
    "/usr/lib/x86_64-linux-gnu/libze_loader.so.1": "",
    "/usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1": "",
}
INTEL = {**drm_node(128, "xe", "8086:E20B", "0000:03:00.0"), **INTEL_PCI, **INTEL_LIBRARIES}
"""A workstation with one Intel card, its driver and Level Zero."""
INTEL_GRAPHICS = {
    **drm_node(130, "i915", "8086:4680", "0000:00:02.0"),
    **pci("0000:00:02.0", 0x8086, 0x4680, 0x0300),
}
"""The graphics of a desktop processor."""
INTEL_NPU = pci("0000:00:0b.0", 0x8086, 0x7D1D, 0x1200)

MUSA_TORCH = {
    **torch_build("2.11.0"),
    **module("torch_musa"),
    "/site-packages/torch_musa/version.py": "__version__ = '2.11.0'\n",
}
MUSA = {
    "/dev/mtgpu.0": "",
    **pci("0000:3b:00.0", 0x1ED5, 0x0400, 0x0302),
    "/usr/local/musa/lib/libmusa.so.4": "",
    "/usr/local/musa/lib/libmusart.so.4": "",
    "/sys/module/mtgpu/version": "3.3.0\n",
}
"""A server with one Moore Threads GPU, its driver and toolkit."""

NPU_TORCH = {
    **torch_build("2.13.0+cpu"),
    **module("torch_npu"),
    "/site-packages/torch_npu/version.py": "__version__ = '2.13.0'\n",
}
NPU = {
    "/dev/davinci0": "",
    "/dev/davinci_manager": "",
    **pci("0000:c1:00.0", 0x19E5, 0xD802, 0x1200),
    "/usr/local/Ascend/driver/lib64/driver/libascend_hal.so": "",
    "/usr/local/Ascend/driver/version.info": "Version=25.2.0\n",
    "/usr/local/Ascend/ascend-toolkit/latest/lib64/libascendcl.so": "",
    "/usr/local/Ascend/ascend-toolkit/latest/version.cfg": "toolkit_running_version=[8.3.0:8.3.RC1]\n",
}
"""A server with one Ascend NPU, its driver and CANN."""
