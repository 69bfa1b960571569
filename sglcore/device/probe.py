"""What a probe answers: four separate facts, each with its evidence and the remedy. Standard library only.

A probe reads the system (device nodes, driver libraries, package metadata) and never imports a tensor library. The scan
at the end knows no device: it lists accelerators that no installed package answers for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

PCI_DEVICES = "/sys/bus/pci/devices"
ACCELERATOR_CLASSES = frozenset({0x0302, 0x0380, 0x1200})
"""PCI classes: 3D controller, display controller without a display, processing accelerator."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that holds or not, how that was seen, and what to do about it."""

    holds: bool
    evidence: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Is the hardware there, is its driver, can the package be imported, can its runtime be used?"""

    hardware: Fact
    driver: Fact
    package: Fact
    runtime: Fact
    details: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Freeze the details as a copy."""
        object.__setattr__(self, "details", MappingProxyType(dict(self.details)))

    @property
    def facts(self) -> Mapping[str, Fact]:
        """The four facts by name, in the order in which they depend on each other."""
        return MappingProxyType(
            {"hardware": self.hardware, "driver": self.driver, "package": self.package, "runtime": self.runtime}
        )

    @property
    def present(self) -> bool:
        """The hardware was seen."""
        return self.hardware.holds

    @property
    def usable(self) -> bool:
        """All four facts hold."""
        return self.first_failure is None

    @property
    def first_failure(self) -> tuple[str, Fact] | None:
        """The first fact that does not hold, with its name; None when all hold."""
        return next(((name, fact) for name, fact in self.facts.items() if not fact.holds), None)


def installed_fact(module: str, distribution: str, remedy: str) -> Fact:
    """Whether a module can be found, with the version of its distribution as the evidence. Nothing is imported."""
    if find_spec(module) is None:
        return Fact(False, f"there is no module {module!r}", remedy)
    try:
        return Fact(True, f"{distribution} {version(distribution)}")
    except PackageNotFoundError:
        return Fact(True, f"module {module!r} without a distribution {distribution!r}")


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A device on the PCI bus."""

    address: str
    vendor_id: int
    device_id: int
    pci_class: int

    def __str__(self) -> str:
        """Its address and numbers as `lspci -nn` prints them."""
        return f"{self.address} [{self.vendor_id:04x}:{self.device_id:04x}] of PCI class {self.pci_class:04x}"

    @property
    def is_accelerator(self) -> bool:
        """Its class is one of those that accelerators have."""
        return self.pci_class in ACCELERATOR_CLASSES


def pci_devices(pci: Path = Path(PCI_DEVICES)) -> tuple[PciDevice, ...]:
    """Every device under `pci`, by address; none when the folder does not exist."""
    folders = sorted(pci.iterdir()) if pci.is_dir() else ()
    return tuple(device for device in map(_read, folders) if device is not None)


def unclaimed_devices(claimed_vendors: Collection[int], pci: Path = Path(PCI_DEVICES)) -> tuple[PciDevice, ...]:
    """Accelerators under `pci` for which no installed package answers: those whose vendor is not claimed."""
    found = (device for device in pci_devices(pci) if device.is_accelerator)
    return tuple(device for device in found if device.vendor_id not in claimed_vendors)


def _read(folder: Path) -> PciDevice | None:
    """One device; None for one that left the bus while it was read."""
    try:
        vendor, device, pci_class = (int((folder / name).read_text(), 16) for name in ("vendor", "device", "class"))
    except (OSError, ValueError):
        return None
    return PciDevice(folder.name, vendor, device, pci_class >> 8)
