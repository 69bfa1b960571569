"""Probes for Moore Threads GPUs: device nodes, the PCI bus, the driver, torch_musa. Does not import
torch_musa.

A shim that emulates another vendor's names (torchada) does not count; it is only mentioned if the
real extension is missing.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from sglcore.device.probe import DeviceInfo, Fact, ProbeReport, installed_fact
from sglcore.device.system import System
from sglcore.device.visible import visible_devices
from sglcore_musa import package

NODES = "/dev/mtgpu*"
VISIBLE = "MUSA_VISIBLE_DEVICES"
MODULE = "/sys/module/mtgpu"
HOME = "/usr/local/musa"
MOUNTS = "start the container with its GPUs (docker run --env MTHREADS_VISIBLE_DEVICES=all, with the vendor's runtime)"
EXTENSION = "install the torch_musa wheel that the vendor publishes for this torch and this MUSA toolkit"


def probe(named: bool, system: System) -> ProbeReport:
    """Implements `DevicePackage.probe` for Moore Threads GPUs: report hardware, driver, package and
    runtime, each with the remedy if it is missing, and the GPUs that this process sees. `named` has
    no effect. Raises nothing for what is missing."""
    nodes = _nodes(system)
    found = [DeviceInfo(index, node) for index, node in enumerate(nodes)]
    seen = visible_devices(found, system.environ, VISIBLE)
    return ProbeReport(
        hardware=_hardware(system, nodes),
        driver=_driver(system, nodes),
        package=installed_fact("sglcore_musa", "sglcore-musa", "pip install sglcore-musa"),
        runtime=seen.failure or _runtime(system),
        devices=seen.devices,
        hidden=seen.hidden,
    )


def _nodes(system: System) -> tuple[str, ...]:
    """Return the GPUs' device nodes, sorted by number; the driver's control node has no number and
    is left out."""
    return tuple(node for node in system.numbered(NODES) if node.removeprefix("/dev/mtgpu").lstrip(".").isdigit())


def _hardware(system: System, nodes: tuple[str, ...]) -> Fact:
    if nodes:
        return Fact(True, ", ".join(nodes))
    found = system.pci(package.pci)
    if found:
        return Fact(True, f"{found[0]} on the bus, without a node {NODES}")
    if _library(system):
        return Fact(False, f"the driver's libmusa.so is there, but neither {NODES} nor a GPU on the PCI bus", MOUNTS)
    return Fact(False, f"neither {NODES} nor such a GPU on the PCI bus", "attach a Moore Threads GPU")


def _driver(system: System, nodes: tuple[str, ...]) -> Fact:
    library = _library(system)
    if library is None:
        return Fact(False, "there is no libmusa.so", f"install the vendor's driver; in a container, {MOUNTS}")
    if not nodes:
        remedy = f"load the driver's module (modprobe mtgpu); in a container, {MOUNTS}"
        loaded = "its module is loaded" if system.exists(MODULE) else "its module is not loaded"
        return Fact(False, f"{library}, but no node {NODES}; {loaded}", remedy)
    return Fact(True, f"{library}, version {_driver_version(system) or 'unknown'}")


def _driver_version(system: System) -> str | None:
    text = system.read(f"{MODULE}/version")
    return text.strip() if text else None


def _folders(system: System) -> tuple[str, ...]:
    homes = (system.environ.get("MUSA_HOME"), system.environ.get("MUSA_PATH"), HOME)
    return tuple(f"{home}/lib" for home in homes if home)


def _library(system: System) -> str | None:
    usual = ("/usr/lib/x86_64-linux-gnu/musa", "/usr/lib/aarch64-linux-gnu/musa")
    return system.library("libmusa.so*", *_folders(system), *usual)


def _runtime(system: System) -> Fact:
    torch = system.torch_build().get("version")
    if torch is None:
        return Fact(False, "torch is not installed", f"install torch, then {EXTENSION.removeprefix('install ')}")
    if not system.module("torch_musa"):
        shim = "; torchada only translates to it" if system.module("torchada") else ""
        return Fact(False, f"there is no module 'torch_musa'{shim}", EXTENSION)
    toolkit = system.library("libmusart.so*", *_folders(system))
    if toolkit is None:
        return Fact(False, "there is no libmusart.so", f"install the MUSA toolkit into {HOME}, or set MUSA_HOME")
    found = extension_version(system)
    if found is not None and not same_release(torch, found):
        return Fact(False, f"torch_musa {found} with torch {torch}; they must be of one version", EXTENSION)
    return Fact(True, f"torch {torch}, torch_musa {found or 'of unknown version'}, {toolkit}")


def extension_version(system: System) -> str | None:
    """Return the version of torch_musa without importing it; None if it is not installed, or its
    version is unknown."""
    found = re.search(r"__version__ = ['\"]([^'\"]+)['\"]", system.read("/site-packages/torch_musa/version.py") or "")
    if found or not system.is_this_machine:
        return found.group(1) if found else None
    try:
        return version("torch_musa")
    except PackageNotFoundError:
        return None


def same_release(torch: str, extension: str) -> bool:
    """Return whether the extension of version `extension` fits torch of version `torch`: it is
    built for one minor version of torch, so the first two numbers must be equal."""
    return torch.split(".")[:2] == extension.split(".")[:2]
