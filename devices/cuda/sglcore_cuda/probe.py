"""Probes for NVIDIA GPUs: device nodes, the PCI bus, the driver, the torch build. Does not import
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from sglcore.device.probe import DeviceInfo, Fact, ProbeReport, installed_fact
from sglcore.device.system import System
from sglcore.device.visible import Visible, all_hidden, shows_none, visible_devices
from sglcore_cuda import package

NODES = "/dev/nvidia[0-9]*"
PARAVIRTUAL = "/dev/dxg"
"""The host's GPU in a Linux guest of Windows (WSL), where PCI and /proc show nothing."""
DRIVER_VERSION = "/proc/driver/nvidia/version"
GUEST_LIBRARIES = "/usr/lib/wsl/lib"
INFORMATION = "/proc/driver/nvidia/gpus/*/information"
"""The driver's description of each GPU, in a folder named by the PCI address."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
OLDEST_DRIVER: Mapping[int, int] = MappingProxyType({11: 450, 12: 525, 13: 580})
"""The oldest driver branch that runs a CUDA runtime of each major version ("CUDA Compatibility",
minor versions)."""
TORCH = (
    "pip install torch==2.13.0 on Linux gives a build with CUDA; replace a processor-only build with --force-reinstall"
)


def probe(named: bool, system: System) -> ProbeReport:
    """Implements `DevicePackage.probe` for NVIDIA GPUs: report hardware, driver, package and torch
    build, each with the remedy if it is missing, and the GPUs that this process sees. `named` has
    no effect. Raises nothing for what is missing."""
    nodes = _nodes(system)
    seen = _visible(system, nodes)
    return ProbeReport(
        hardware=_hardware(system, nodes),
        driver=_driver(system, nodes),
        package=installed_fact("sglcore_cuda", "sglcore-cuda", "pip install sglcore-cuda"),
        runtime=seen.failure or _runtime(system),
        devices=seen.devices,
        hidden=seen.hidden,
    )


def _nodes(system: System) -> tuple[str, ...]:
    guest = (PARAVIRTUAL,) if system.exists(PARAVIRTUAL) and system.library("libcuda.so.1", GUEST_LIBRARIES) else ()
    return (*(node for node in system.numbered(NODES) if node.removeprefix("/dev/nvidia").isdigit()), *guest)


def _visible(system: System, nodes: tuple[str, ...]) -> Visible:
    """Return the GPUs in CUDA's numbering for this process, as `CUDA_VISIBLE_DEVICES` selects them,
    and what it hides. On WSL the list is empty, because no file describes the GPU."""
    value = system.environ.get(VISIBLE, "")
    if nodes and value.startswith("MIG-"):
        part = value.partition(",")[0]
        return Visible((DeviceInfo(0, part),), f"{VISIBLE}={value!r} shows one part of a GPU")
    if PARAVIRTUAL in nodes:
        hidden = f"{VISIBLE}={value!r} shows no GPU" if VISIBLE in system.environ and shows_none(value) else ""
        return Visible((), hidden, all_hidden(hidden, is_wanted=True) if hidden else None)
    return visible_devices(_gpus(system, nodes), system.environ, VISIBLE)


def _gpus(system: System, nodes: tuple[str, ...]) -> tuple[DeviceInfo, ...]:
    """Return the GPUs that have a node in `nodes`, with what the driver's files say of each, in
    CUDA's order before any selection.

    If the files do not list one GPU for each node, a GPU is named by its node alone. With different
    models, and no order set, each is named by all models, because no file gives CUDA's order.
    """
    told = {path.split("/")[-2]: _fields(system.read(path) or "") for path in system.glob(INFORMATION)}
    minors = {node.removeprefix("/dev/nvidia") for node in nodes}
    here = {address: gpu for address, gpu in told.items() if gpu.get("Device Minor") in (None, *minors)}
    if len(here) != len(nodes):
        return tuple(DeviceInfo(index, node) for index, node in enumerate(nodes))
    models = sorted({gpu.get("Model", "unknown model") for gpu in here.values()})
    by_uuid = system.environ.get(VISIBLE, "").startswith("GPU-")
    if len(models) > 1 and system.environ.get(ORDER) != "PCI_BUS_ID" and not by_uuid:
        # CUDA numbers the fastest first; no file says which that is.
        return tuple(DeviceInfo(index, " or ".join(models)) for index in range(len(here)))
    return tuple(
        DeviceInfo(index, gpu.get("Model", "unknown model"), pci_address=address, uuid=gpu.get("GPU UUID"))
        for index, (address, gpu) in enumerate(here.items())
    )


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _hardware(system: System, nodes: tuple[str, ...]) -> Fact:
    if nodes:
        return Fact(True, f"{', '.join(nodes)}")
    found = system.pci(package.pci)
    if found:
        return Fact(True, f"{found[0]} on the bus, without a node {NODES}")
    if _library(system):
        remedy = "start the container with its GPUs (docker run --gpus all)"
        return Fact(False, f"the driver's libcuda.so.1 is there, but neither {NODES} nor a GPU on the PCI bus", remedy)
    return Fact(False, f"neither {NODES} nor an NVIDIA GPU on the PCI bus", "attach an NVIDIA GPU")


def _driver(system: System, nodes: tuple[str, ...]) -> Fact:
    library, version = _library(system), driver_version(system)
    if library is None:
        remedy = "install the NVIDIA driver; in a container, the NVIDIA container toolkit mounts it"
        return Fact(False, "there is no libcuda.so.1", remedy)
    if version is None and PARAVIRTUAL not in nodes:
        return Fact(False, f"{library} without {DRIVER_VERSION}", "load the driver's module (modprobe nvidia)")
    if not nodes:
        remedy = "start the container with its GPUs (docker run --gpus all), or choose --device cpu"
        return Fact(False, f"{library}, but no node {NODES}", remedy)
    return Fact(True, f"{library}, version {version or 'of the host'}")


def _library(system: System) -> str | None:
    return system.library("libcuda.so.1", GUEST_LIBRARIES)


def driver_version(system: System) -> str | None:
    """Return the version of the loaded kernel module, such as "550.54.14"; None if no module is
    loaded or its file names none."""
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", system.read(DRIVER_VERSION) or "")
    return found.group(1) if found else None


def _runtime(system: System) -> Fact:
    build = system.torch_build()
    if not build:
        return Fact(False, "torch is not installed", TORCH)
    torch, cuda = f"torch {build.get('version', '?')}", build.get("cuda")
    if cuda is None:
        made_for = "AMD GPUs" if build.get("hip") else "processors"
        return Fact(False, f"{torch} was built for {made_for}", TORCH)
    version = driver_version(system)
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]), 0)
    if version is not None and int(version.partition(".")[0]) < oldest:
        remedy = f"update the driver to {oldest} or newer, or install a torch built for an older CUDA"
        return Fact(False, f"{torch} with CUDA {cuda} needs driver {oldest}, found {version}", remedy)
    return Fact(True, f"{torch} with CUDA {cuda}")
