"""The simulator's own kinds: the properties of each chip, and the system files that show it.

Figures follow the vendors' publications; memory is close to what a driver reports, which is seldom
a round number. They were not read from real machines. They give tests realistic shapes and budgets;
no measurement uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from sglcore_sim.kinds import Kind, pci

KIB, MIB = 1 << 10, 1 << 20
NO_GRAPH: Mapping[str, Any] = MappingProxyType({"capabilities": frozenset()})
"""torch 2.13 refuses `torch.accelerator.Graph` for these kinds."""
NCCL: Mapping[str, Any] = MappingProxyType({"collectives": "nccl", "has_captured_collectives": True})
"""NCCL, and RCCL under its name: captured graphs may hold their calls."""


def gpu(
    name: str, capability: tuple[int, int], processors: int, mib: int, *, l2: int, shared: int, threads: int = 2048
) -> dict[str, Any]:
    """Return properties of a GPU by the names of `torch.cuda.get_device_properties`. `name`: the
    product's name; `capability`: (major, minor); `processors`: multiprocessors; `mib`: memory in
    MiB; `l2`: L2 cache in MiB; `shared`: shared memory in KiB per multiprocessor; `threads`: the
    most per multiprocessor."""
    return {
        "name": name,
        "major": capability[0],
        "minor": capability[1],
        "multi_processor_count": processors,
        "total_memory": mib * MIB,
        "warp_size": 32,
        "L2_cache_size": l2 * MIB,
        "max_threads_per_multi_processor": threads,
        "regs_per_multiprocessor": 65536,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_block_optin": (shared - 1) * KIB,
        "shared_memory_per_multiprocessor": shared * KIB,
    }


def cuda(chip: str, device: int, pci_class: int, properties: dict[str, Any]) -> Kind:
    """Return the kind of an NVIDIA GPU with driver 570. `chip`: its name for `--sim`, such as
    "H100"; `device`: PCI device id; `pci_class`: PCI class of 24 bits; `properties`: as `gpu`
    returns them."""
    driver = "570.86.15"
    files = {
        "dev/nvidia{i}": "",
        "dev/nvidiactl": "",
        "dev/nvidia-uvm": "",
        "usr/lib/x86_64-linux-gnu/libcuda.so.1": "",
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}\n",
        "proc/driver/nvidia/gpus/0000:{bus}:00.0/information": f"Model: \t\t {properties['name']}\n",
        "site-packages/torch/version.py": (
            "__version__ = '{torch}+cu128'\ncuda: str | None = '12.8'\nhip: str | None = None\n"
        ),
        **pci(0x10DE, device, pci_class),
    }
    arch = f"sm_{properties['major']}{properties['minor']}"
    libraries = ("flashinfer", "flash_attn", "flash_mla") if arch == "sm_90" else ("flashinfer",)
    return _kind("cuda", chip, arch, properties, files, libraries, torch_name="cuda", **NCCL, **NO_GRAPH)


def hip(chip: str, device: int, pci_class: int, target: str, properties: dict[str, Any], features: str = "") -> Kind:
    """Return the kind of an AMD GPU with ROCm 6.4. `chip`, `device` and `pci_class` as for `cuda`;
    `properties` as `amd` returns them; `target`: the compilers' name, such as "gfx942"; `features`:
    appended to it in `gcnArchName`. On MI250 a device is one of the two dies."""
    wide, units = target.startswith("gfx9"), properties["multi_processor_count"]
    lanes, per_unit = (64, 4) if wide else (32, 2)
    version = int(target[3:-2]) * 10000 + int(target[-2], 16) * 100 + int(target[-1], 16)
    node = {
        "simd_count": units * per_unit,
        "simd_per_cu": per_unit,
        "wave_front_size": lanes,
        "gfx_target_version": version,
        "vendor_id": 4098,
    }
    folder = "sys/class/kfd/kfd/topology/nodes"
    files = {
        "dev/kfd": "",
        "dev/dri/renderD{render}": "",
        f"{folder}/0/properties": "cpu_cores_count 64\nsimd_count 0\n",
        f"{folder}/{{node}}/properties": "".join(f"{name} {value}\n" for name, value in node.items()),
        "opt/rocm/lib/libamdhip64.so.6": "",
        "opt/rocm/lib/libhsa-runtime64.so.1": "",
        "site-packages/torch/version.py": (
            "__version__ = '{torch}+rocm6.4'\ncuda: str | None = None\nhip: str | None = '6.4.43482'\n"
        ),
        **pci(0x1002, device, pci_class),
    }
    known = {**properties, "warp_size": lanes, "gcnArchName": target + features}
    libraries = ("aiter",) if target in ("gfx942", "gfx950") else ()
    return _kind("hip", chip, target, known, files, libraries, torch_name="cuda", **NCCL, **NO_GRAPH)


def musa(chip: str, device: int, properties: dict[str, Any]) -> Kind:
    """Return the kind of a Moore Threads GPU with the vendor's driver, and a torch_musa of torch's
    version. `chip` and `device` as for `cuda`; `properties`: as `mthreads` returns them."""
    files = {
        "dev/mtgpu.{i}": "",
        "sys/module/mtgpu/version": "3.3.1\n",
        "usr/lib/x86_64-linux-gnu/musa/libmusa.so.1": "",
        "usr/local/musa/lib/libmusart.so.4": "",
        "site-packages/torch/version.py": "__version__ = '{torch}'\ncuda: str | None = None\nhip: str | None = None\n",
        "site-packages/torch_musa/version.py": "__version__ = '{torch}'\n",
        **pci(0x1ED5, device, 0x030000),
    }
    arch = f"mp_{properties['major']}{properties['minor']}"
    libraries = ("torch_musa_ops",) if arch == "mp_31" else ()
    return _kind("musa", chip, arch, properties, files, libraries, torch_name="musa", collectives="mccl")


def npu(chip: str, device: int, properties: dict[str, Any]) -> Kind:
    """Return the kind of an Ascend NPU with CANN 8.5, and a torch_npu of torch's version. `chip`
    and `device` as for `cuda`; `properties` as `ascend` returns them. On chips of two dies a device
    is one die."""
    home = "usr/local/Ascend"
    files = {
        "dev/davinci{i}": "",
        "dev/davinci_manager": "",
        "dev/devmm_svm": "",
        "dev/hisi_hdc": "",
        "etc/ascend_install.info": "Driver_Install_Path_Param=/usr/local/Ascend\n",
        f"{home}/driver/version.info": "Version=25.5.0\n",
        f"{home}/driver/lib64/driver/libascend_hal.so": "",
        f"{home}/ascend-toolkit/latest/lib64/libascendcl.so": "",
        f"{home}/ascend-toolkit/latest/version.cfg": "toolkit_running_version=[8.5.0:8.5.0]\n",
        "site-packages/torch/version.py": "__version__ = '{torch}'\ncuda: str | None = None\nhip: str | None = None\n",
        "site-packages/torch_npu/version.py": "__version__ = '{torch}'\n",
        **pci(0x19E5, device, 0x120000),
    }
    updates = frozenset({"neutral_graph", "graph_update"})
    name = properties["name"]
    return _kind(
        "npu", chip, name, properties, files, ("torch_npu",), torch_name="npu", collectives="hccl", capabilities=updates
    )


def _kind(
    name: str,
    chip: str,
    arch: str,
    properties: dict[str, Any],
    files: dict[str, str],
    libraries: tuple[str, ...],
    **values: Any,
) -> Kind:
    """Return a kind. `name`: the device's, such as "cuda"; `chip`, `arch`: the chip's name for
    `--sim` and for compilers; `files`: system files by path; `values`: other fields of Kind.
    `libraries`: modules of `sglcore_sim.vendors`; callers leave a library without kernels for the
    chip out, as it is not installed on such a machine."""
    return Kind(
        name=name,
        chip=chip,
        arch=arch,
        properties=MappingProxyType(properties),
        files=MappingProxyType(files),
        face=f"sglcore_sim.faces.{name}:plant",
        libraries=tuple(f"sglcore_sim.vendors.{module}:plant" for module in libraries),
        **values,
    )


def amd(name: str, capability: tuple[int, int], units: int, mib: int, l2: int) -> dict[str, Any]:
    return {**gpu(name, capability, units, mib, l2=l2, shared=65), "shared_memory_per_block": 64 * KIB}


def mthreads(name: str, capability: tuple[int, int], mib: int) -> dict[str, Any]:
    """Return the properties that torch_musa reports, by name; `mib`: memory in MiB. The number of
    multiprocessors is not among them, because the vendor has not published it."""
    return {"name": name, "major": capability[0], "minor": capability[1], "total_memory": mib * MIB}


def ascend(name: str, cubes: int, vectors: int, mib: int, l2: int) -> dict[str, Any]:
    return {
        "name": name,
        "cube_core_num": cubes,
        "vector_core_num": vectors,
        "total_memory": mib * MIB,
        "L2_cache_size": l2 * MIB,
    }


CARD, DISPLAY, PROCESSING = 0x030200, 0x030000, 0x120000
SERVER_FEATURES = ":sramecc+:xnack-"

CUDA = (
    cuda("H100", 0x2330, CARD, gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 81559, l2=50, shared=228)),
    cuda("H200", 0x2335, CARD, gpu("NVIDIA H200", (9, 0), 132, 143771, l2=60, shared=228)),
    cuda("A100", 0x20B2, CARD, gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 81920, l2=40, shared=164)),
    cuda("L4", 0x27B8, CARD, gpu("NVIDIA L4", (8, 9), 58, 23034, l2=48, shared=100, threads=1536)),
    cuda(
        "RTX4090",
        0x2684,
        DISPLAY,
        gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 24564, l2=72, shared=100, threads=1536),
    ),
)
HIP = (
    hip("MI300X", 0x74A1, PROCESSING, "gfx942", amd("AMD Instinct MI300X", (9, 4), 304, 196592, 4), SERVER_FEATURES),
    hip("MI355X", 0x75A3, PROCESSING, "gfx950", amd("AMD Instinct MI355X", (9, 5), 256, 294896, 4), SERVER_FEATURES),
    hip(
        "MI250",
        0x740C,
        PROCESSING,
        "gfx90a",
        amd("AMD Instinct MI250X / MI250", (9, 0), 104, 65520, 8),
        SERVER_FEATURES,
    ),
    hip("RX7900XTX", 0x744C, DISPLAY, "gfx1100", amd("AMD Radeon RX 7900 XTX", (11, 0), 48, 24560, 6)),
)
MUSA = (
    musa("S5000", 0x0400, mthreads("MTT S5000", (3, 1), 81920)),
    musa("S4000", 0x0323, mthreads("MTT S4000", (2, 2), 49152)),
    musa("S80", 0x0201, mthreads("MTT S80", (2, 1), 16302)),
)
NPU = (
    npu("910B3", 0xD802, ascend("Ascend910B3", 20, 40, 62432, 192)),
    npu("910C", 0xD803, ascend("Ascend910_9382", 24, 48, 62740, 192)),
    npu("310P", 0xD500, ascend("Ascend310P3", 8, 7, 21527, 16)),
)
