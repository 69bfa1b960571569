"""The PCI bus, and what a package claims of it. It knows no vendor. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

PCI_DEVICES = "/sys/bus/pci/devices"
ACCELERATOR_CLASSES = frozenset({0x0302, 0x0380, 0x1200})
"""PCI classes: 3D controller, display controller without a display, processing accelerator."""
DISPLAY_CLASS = 0x0300
"""What drives a screen: an accelerator only where a package says so."""


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


@dataclass(frozen=True, slots=True)
class PciClaim:
    """Devices for which a package answers: those of a vendor that are of these classes. A vendor's number alone says little:
    it may be on network cards, on a processor's graphics, and on accelerators of two kinds."""

    vendor_id: int
    classes: frozenset[int] = ACCELERATOR_CLASSES
    graphics: str = ""
    """How the addresses end at which the vendor's processors have graphics of their own, such as ":00:02.0": the package
    answers for those too, but need not mean to run there. Empty: every device that is covered is an accelerator."""

    def is_sure_of(self, device: PciDevice) -> bool:
        """Whether it is one of them, and an accelerator beyond doubt: one that a start must not pass by unseen."""
        return self.covers(device) and not (self.graphics and device.address.endswith(self.graphics))

    def covers(self, device: PciDevice) -> bool:
        """Whether it is one of them."""
        return device.vendor_id == self.vendor_id and device.pci_class in self.classes


def pci_devices(pci: Path = Path(PCI_DEVICES)) -> tuple[PciDevice, ...]:
    """Every device under `pci`, by address; none when the folder does not exist."""
    folders = sorted(pci.iterdir()) if pci.is_dir() else ()
    return tuple(device for device in map(_read, folders) if device is not None)


def claimed_devices(claims: Collection[PciClaim], devices: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """Those of `devices` for which some claim answers."""
    return tuple(device for device in devices if any(claim.covers(device) for claim in claims))


def unclaimed_devices(claims: Collection[PciClaim], devices: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """The accelerators among `devices` for which no claim answers."""
    accelerators = (device for device in devices if device.is_accelerator)
    return tuple(device for device in accelerators if not any(claim.covers(device) for claim in claims))


def _read(folder: Path) -> PciDevice | None:
    """One device; None for one that left the bus while it was read."""
    try:
        vendor, device, pci_class = (int((folder / name).read_text(), 16) for name in ("vendor", "device", "class"))
    except (OSError, ValueError):
        return None
    return PciDevice(folder.name, vendor, device, pci_class >> 8)
