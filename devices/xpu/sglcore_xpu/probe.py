"""Probes for Intel GPUs: render nodes, the PCI bus, Level Zero, the torch build. Does not import
torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglcore.device.pci import PCI_DEVICES
from sglcore.device.probe import DeviceInfo, Fact, ProbeReport, installed_fact
from sglcore.device.system import System
from sglcore.device.visible import Visible, visible_devices
from sglcore_xpu import GRAPHICS, package

NODES = "/dev/dri/renderD*"
VENDOR = "8086:"
DRIVERS = ("i915", "xe")
LIBRARIES = ("libze_loader.so.1", "libze_intel_gpu.so.1")
"""Level Zero's loader, and the GPU driver that it loads; torch's wheels do not contain them."""
MASK, SELECTOR, HIERARCHY = "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "ZE_FLAT_DEVICE_HIERARCHY"
TORCH = (
    "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/xpu, "
    "with --force-reinstall over another build"
)
DESELECTED = f"unset {SELECTOR}, or set it to level_zero:gpu"
LEVEL_ZERO = "apt install libze1 libze-intel-gpu1 (level-zero intel-level-zero-gpu in older repositories of Intel's)"
MOUNTS = "a container takes --device /dev/dri"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A render node of an Intel GPU. `driver`: the kernel driver's name ("": unknown); `address`:
    its PCI address; `tiles`: the number of devices that the runtime makes of it."""

    node: str
    driver: str
    address: str
    tiles: int = 1

    @property
    def is_graphics(self) -> bool:
        """Whether it is a CPU's integrated graphics, by its PCI address."""
        return self.address.endswith(GRAPHICS)


def probe(named: bool, system: System) -> ProbeReport:
    """Implements `DevicePackage.probe` for Intel GPUs: report hardware, driver, package and torch
    build, each with the remedy if it is missing, and the GPUs that this process sees. Integrated
    graphics count as hardware only if `named` (the user chose this device). Raises nothing for what
    is missing."""
    gpus = render_nodes(system)
    seen = _visible(system, gpus)
    return ProbeReport(
        hardware=_hardware(system, gpus, named),
        driver=_driver(system, gpus),
        package=installed_fact("sglcore_xpu", "sglcore-xpu", "pip install sglcore-xpu"),
        runtime=seen.failure or _runtime(system),
        devices=seen.devices,
        hidden=seen.hidden,
    )


def render_nodes(system: System) -> tuple[Gpu, ...]:
    """Return the render nodes of Intel GPUs, cards first, integrated graphics last, each in the
    order of node numbers.

    The runtime hides integrated graphics if there is a card; they are listed here all the same.
    """
    found = (_gpu(system, node) for node in system.numbered(NODES))
    return tuple(sorted((gpu for gpu in found if gpu is not None), key=lambda gpu: gpu.is_graphics))


def _gpu(system: System, node: str) -> Gpu | None:
    text = system.read(f"/sys/class/drm/{node.rpartition('/')[2]}/device/uevent") or ""
    told = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if not told.get("PCI_ID", "").startswith(VENDOR):
        return None
    address = told.get("PCI_SLOT_NAME", "")
    folder = f"{PCI_DEVICES}/{address}"
    gpu = Gpu(node, told.get("DRIVER", ""), address)
    if gpu.is_graphics or system.environ.get(HIERARCHY) == "COMPOSITE":
        return gpu
    tiles = system.glob(f"{folder}/tile[0-9]*") or system.glob(f"{folder}/drm/card*/gt/gt[0-9]*")
    return Gpu(node, gpu.driver, address, max(1, len(tiles)))


def _visible(system: System, gpus: tuple[Gpu, ...]) -> Visible:
    """Return the devices that torch counts, as environment variables select them, and what these
    hide: only cards, if there is one. The list is empty if a variable selects devices by numbers
    that no file contains."""
    environ = {name: value for name in (SELECTOR, MASK) if (value := system.environ.get(name))}
    if environ.get(MASK) == "default":
        del environ[MASK]
    said = " and ".join(f"{name}={value!r}" for name, value in environ.items())
    if selects_none(environ.get(SELECTOR, "")):
        return Visible((), said, Fact(False, f"{said} selects nothing of level_zero", DESELECTED, is_wanted=True))
    if SELECTOR in environ or "." in environ.get(MASK, ""):
        return Visible((), f"{said} chooses devices by the runtime's own numbers")
    cards = tuple(gpu for gpu in gpus if not gpu.is_graphics) or gpus
    names = [
        (f"{gpu.node} tile {i}" if gpu.tiles > 1 else gpu.node, gpu.address) for gpu in cards for i in range(gpu.tiles)
    ]
    devices = [DeviceInfo(index, name, pci_address=address) for index, (name, address) in enumerate(names)]
    return visible_devices(devices, environ, MASK)


def selects_none(selector: str) -> bool:
    """Return whether ONEAPI_DEVICE_SELECTOR with the value `selector` leaves no device for torch,
    which uses Level Zero only; False for an empty value. Terms with "!" exclude devices; without
    other terms they exclude from all devices."""
    terms = [term.strip().lower() for term in selector.split(";") if term.strip()]
    taken = [term for term in terms if not term.startswith("!")]
    away = {term[1:] for term in terms if term.startswith("!")}
    if away & {f"{backend}:{devices}" for backend in ("*", "level_zero") for devices in ("*", "gpu")}:
        return True
    return bool(taken) and not any(term.partition(":")[0] in ("*", "level_zero") for term in taken)


def _hardware(system: System, gpus: tuple[Gpu, ...], named: bool) -> Fact:
    cards = tuple(gpu for gpu in gpus if not gpu.is_graphics)
    if cards or (gpus and named):
        return Fact(True, ", ".join(gpu.node for gpu in cards or gpus))
    on_bus = [device for device in system.pci(package.pci) if named or not device.address.endswith(GRAPHICS)]
    if on_bus:
        return Fact(True, f"{on_bus[0]} on the bus, without a node {NODES}")
    if gpus or system.pci(package.pci):
        evidence = "only integrated graphics of a processor, not an accelerator"
        return Fact(False, evidence, "select it with --device xpu to use it anyway")
    return Fact(False, f"neither a node {NODES} of an Intel GPU nor one on the PCI bus", f"attach one; {MOUNTS}")


def _driver(system: System, gpus: tuple[Gpu, ...]) -> Fact:
    if not gpus:
        remedy = f"load the driver (modprobe xe, or i915 for older GPUs); {MOUNTS}"
        return Fact(False, f"there is no node {NODES} of an Intel GPU", remedy)
    gpu = gpus[0]
    if gpu.driver not in DRIVERS:
        return Fact(False, f"{gpu.node} is served by {gpu.driver or 'no driver'}", f"load one of {', '.join(DRIVERS)}")
    if not os.access(system.path(gpu.node), os.R_OK | os.W_OK):
        return Fact(False, f"{gpu.node} may not be opened", "add the user to the group render, and log in again")
    found = {name: system.library(name) for name in LIBRARIES}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        return Fact(False, f"{gpu.node} by {gpu.driver}, but there is no {', '.join(missing)}", LEVEL_ZERO)
    return Fact(True, f"{gpu.node} by {gpu.driver}, {', '.join(filter(None, found.values()))}")


def _runtime(system: System) -> Fact:
    build = system.torch_build()
    if not build:
        return Fact(False, "torch is not installed", TORCH)
    torch, compiler = f"torch {build.get('version', '?')}", build.get("xpu")
    if compiler is None:
        made_for = next((who for name, who in MADE_FOR if name in build), "processors")
        return Fact(False, f"{torch} was built for {made_for}", TORCH)
    return Fact(True, f"{torch} with the SYCL compiler {compiler}")


MADE_FOR = (("cuda", "NVIDIA GPUs"), ("hip", "AMD GPUs"))
