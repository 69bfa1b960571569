"""Probes for AMD GPUs: the compute driver's node and topology, libraries, the torch build. Does not
import torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sglcore.device.pci import PCI_DEVICES
from sglcore.device.probe import DeviceInfo, Fact, ProbeReport, installed_fact
from sglcore.device.system import System
from sglcore.device.visible import visible_devices
from sglcore_hip import package

COMPUTE_NODE = "/dev/kfd"
RENDER_NODES = "/dev/dri/renderD*"
TOPOLOGY = "/sys/class/kfd/kfd/topology/nodes"
LIBRARIES = ("libamdhip64.so*", "libhsa-runtime64.so*")
FOLDERS = ("/opt/rocm/lib", "/opt/rocm/lib64", "/opt/rocm-*/lib")
FEWEST_UNITS = 16
"""A GPU with fewer compute units is a CPU's integrated graphics, which is used only if named."""
BUSY = 1 << 30
"""A GPU with more bytes in use than this is busy. The driver of an idle GPU holds less."""
TORCH = "pip install torch==2.13.0 from the ROCm index that pytorch.org names (--index-url), with --force-reinstall"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU in the compute driver's topology. `node`: its number there, as text; `target`: the
    compilers' name, such as "gfx942"; `uuid`: "GPU-" and 16 hexadecimal digits; `render_node`: its
    device file. None: the driver does not tell."""

    node: str
    target: str
    compute_units: int
    wave_size: int
    pci_address: str | None = None
    uuid: str | None = None
    render_node: str | None = None

    def __str__(self) -> str:
        return f"{self.target} with {self.compute_units} compute units"


def probe(named: bool, system: System) -> ProbeReport:
    """Implements `DevicePackage.probe` for AMD GPUs: report hardware, driver, package and torch
    build, each with the remedy if it is missing, and the GPUs that this process sees. Integrated
    graphics count as hardware only if `named` (the user chose this device). Raises nothing for what
    is missing."""
    gpus = topology(system)
    seen = visible_devices([_device(system, i, gpu) for i, gpu in enumerate(gpus)], system.environ, *_variables(system))
    return ProbeReport(
        hardware=_hardware(system, gpus, named),
        driver=_driver(system),
        package=installed_fact("sglcore_hip", "sglcore-hip", "pip install sglcore-hip"),
        runtime=seen.failure or _runtime(system),
        devices=seen.devices,
        hidden=seen.hidden,
    )


def _variables(system: System) -> tuple[str, str]:
    """Return the two environment variables that hide GPUs, in the order in which they apply.

    The first hides GPUs from the whole runtime, the second from HIP. The second has two names:
    HIP_VISIBLE_DEVICES if it is set, else CUDA_VISIBLE_DEVICES.
    """
    own = "HIP_VISIBLE_DEVICES"
    return "ROCR_VISIBLE_DEVICES", own if own in system.environ else "CUDA_VISIBLE_DEVICES"


def topology(system: System) -> tuple[Gpu, ...]:
    """Return the GPUs that the compute driver lists, ordered by node number.

    A GPU is left out if the render node that the driver names for it does not exist here. A node
    without SIMD units is a processor and is left out too.
    """
    nodes = system.numbered(f"{TOPOLOGY}/*")
    found = (_gpu(node, system.read(f"{node}/properties") or "") for node in nodes)
    return tuple(gpu for gpu in found if gpu and (gpu.render_node is None or system.exists(gpu.render_node)))


def _gpu(node: str, text: str) -> Gpu | None:
    pairs = (line.split() for line in text.splitlines())
    values = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    simds = values.get("simd_count", 0)
    if not simds:
        return None
    version = values.get("gfx_target_version", 0)
    target = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    units = simds // max(values.get("simd_per_cu", 2), 1)
    place, number, minor = (values.get(name) for name in ("location_id", "unique_id", "drm_render_minor"))
    return Gpu(
        node.rpartition("/")[2],
        target,
        units,
        values.get("wave_front_size", 0),
        None if place is None else _address(values.get("domain", 0), place),
        f"GPU-{number:016x}" if number else None,
        f"/dev/dri/renderD{minor}" if minor else None,
    )


def _address(domain: int, location: int) -> str:
    """Return the PCI address as text, such as "0000:03:00.0"; `location` contains bus, device and
    function as bits."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _device(system: System, index: int, gpu: Gpu) -> DeviceInfo:
    folder = f"{PCI_DEVICES}/{gpu.pci_address}"
    product = (system.read(f"{folder}/product_name") or "").strip()
    memory, used = (_number(system.read(f"{folder}/mem_info_vram_{what}")) for what in ("total", "used"))
    name = f"{product} ({gpu})" if product else str(gpu)
    return DeviceInfo(index, name, memory, None if used is None else used > BUSY, gpu.pci_address, gpu.uuid)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None


def _hardware(system: System, gpus: tuple[Gpu, ...], named: bool) -> Fact:
    if gpus:
        return _listed(gpus, named)
    found = system.pci(package.pci)
    if found:
        return Fact(True, f"{found[0]} on the bus, which {TOPOLOGY} does not list")
    where = f"{TOPOLOGY} lists no GPU" if system.exists(TOPOLOGY) else f"there is no {TOPOLOGY}"
    if _library(system) is not None:
        where = f"{where}, though ROCm is installed"
    return Fact(False, where, "attach an AMD GPU; a container takes --device /dev/kfd --device /dev/dri")


def _listed(gpus: tuple[Gpu, ...], named: bool) -> Fact:
    large = tuple(gpu for gpu in gpus if gpu.compute_units >= FEWEST_UNITS)
    if large or named:
        return Fact(True, f"{TOPOLOGY}: {', '.join(map(str, large or gpus))}")
    evidence = f"only {', '.join(map(str, gpus))}: integrated graphics of a processor, not an accelerator"
    return Fact(False, evidence, "select it with --device hip to use it anyway")


def _driver(system: System) -> Fact:
    if not system.exists(COMPUTE_NODE):
        remedy = "load the driver (modprobe amdgpu); a container takes --device /dev/kfd --device /dev/dri"
        return Fact(False, f"there is no {COMPUTE_NODE}", remedy)
    if not os.access(system.path(COMPUTE_NODE), os.R_OK | os.W_OK):
        return Fact(False, f"{COMPUTE_NODE} may not be opened", "add the user to the group render, and log in again")
    nodes = system.glob(RENDER_NODES)
    if not nodes:
        return Fact(False, f"{COMPUTE_NODE}, but no {RENDER_NODES}", "a container takes --device /dev/dri too")
    library = _library(system)
    if library is None:
        remedy = "install ROCm, or a torch built for it, which brings its own copy"
        return Fact(False, f"{COMPUTE_NODE}, but neither of {', '.join(LIBRARIES)}", remedy)
    return Fact(True, f"{COMPUTE_NODE}, {nodes[0]}, {library}")


def _library(system: System) -> str | None:
    """Return the path of the HIP or HSA runtime library: the system's, or else the copy in a torch
    build; None if there is neither."""
    for name in LIBRARIES:
        found = system.library(name, *FOLDERS) or next(iter(system.glob(f"/site-packages/torch/lib/{name}")), None)
        if found is not None:
            return found
    if not system.is_this_machine:
        return None
    spec = find_spec("torch")
    folder = Path(spec.origin).with_name("lib") if spec is not None and spec.origin else None
    return next((str(file) for name in LIBRARIES for file in sorted(folder.glob(name))), None) if folder else None


def _runtime(system: System) -> Fact:
    build = system.torch_build()
    if not build:
        return Fact(False, "torch is not installed", TORCH)
    torch, hip = f"torch {build.get('version', '?')}", build.get("hip")
    if hip is None:
        return Fact(False, f"{torch} was built for {'NVIDIA GPUs' if build.get('cuda') else 'processors'}", TORCH)
    return Fact(True, f"{torch} with HIP {hip}")
