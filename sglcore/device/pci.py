"""The PCI bus, and the devices that a package claims. It knows no vendor. Standard library only."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

PCI_DEVICES = "/sys/bus/pci/devices"
ACCELERATOR_CLASSES = frozenset({0x0302, 0x0380, 0x1200})
"""PCI classes: 3D controller, display controller without a display, processing accelerator."""
DISPLAY_CLASS = 0x0300
"""PCI class of a display controller: an accelerator only if a package claims it."""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A device on the PCI bus: its address such as "0000:3b:00.0", its numbers, and `pci_class`,
    class and subclass in 16 bits."""

    address: str
    vendor_id: int
    device_id: int
    pci_class: int

    def __str__(self) -> str:
        """Return its address and numbers in hexadecimal, such as "0000:3b:00.0 [1234:abcd] of PCI
        class 0302"."""
        return f"{self.address} [{self.vendor_id:04x}:{self.device_id:04x}] of PCI class {self.pci_class:04x}"

    @property
    def is_accelerator(self) -> bool:
        """Whether its PCI class is one of those of accelerators."""
        return self.pci_class in ACCELERATOR_CLASSES


@dataclass(frozen=True, slots=True)
class PciClaim:
    """The devices that belong to a package: those of a vendor in these classes. A vendor id alone
    is not enough: it may be on network cards, on a processor's graphics, and on accelerators of two
    kinds.
    """

    vendor_id: int
    classes: frozenset[int] = ACCELERATOR_CLASSES
    graphics: str = ""
    """End of the addresses of graphics inside the vendor's processors, such as ":00:02.0". They
    belong to the package too, but it need not run on them. Empty: every claimed device is an
    accelerator.
    """

    def is_sure_of(self, device: PciDevice) -> bool:
        """Return whether the device is claimed and certainly an accelerator, which a start must not
        ignore.
        """
        return self.covers(device) and not (self.graphics and device.address.endswith(self.graphics))

    def covers(self, device: PciDevice) -> bool:
        """Return whether the device is claimed."""
        return device.vendor_id == self.vendor_id and device.pci_class in self.classes


def pci_devices(pci: Path = Path(PCI_DEVICES)) -> tuple[PciDevice, ...]:
    """Return every device under the folder `pci`, sorted by address; none if the folder does not
    exist. A device that cannot be read is left out."""
    folders = sorted(pci.iterdir()) if pci.is_dir() else ()
    return tuple(device for device in map(_read, folders) if device is not None)


def claimed_devices(claims: Collection[PciClaim], devices: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """Return the devices that a claim covers."""
    return tuple(device for device in devices if any(claim.covers(device) for claim in claims))


def unclaimed_devices(claims: Collection[PciClaim], devices: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """Return the accelerators among `devices` that no claim covers."""
    accelerators = (device for device in devices if device.is_accelerator)
    return tuple(device for device in accelerators if not any(claim.covers(device) for claim in claims))


def _read(folder: Path) -> PciDevice | None:
    """Read the device of one folder; None if a file cannot be read or is no number, because the
    device left the bus meanwhile."""
    try:
        vendor, device, pci_class = (int((folder / name).read_text(), 16) for name in ("vendor", "device", "class"))
    except (OSError, ValueError):
        return None
    return PciDevice(folder.name, vendor, device, pci_class >> 8)
