"""What is known of each installed package before one is chosen: its probe report, or its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglcore.core.errors import DeviceError, SglcoreError
from sglcore.device.discovery import Installed, pip
from sglcore.device.package import DevicePackage, resolve
from sglcore.device.pci import PciClaim, PciDevice
from sglcore.device.probe import ProbeReport
from sglcore.device.system import System, host_system


@dataclass(frozen=True, slots=True)
class Candidate:
    """An installed package with its probe report, or with the error that loading or probing it
    raised.
    """

    installed: Installed
    report: ProbeReport | None = None
    error: Exception | None = None

    @property
    def name(self) -> str:
        """The name for `--device`."""
        return self.installed.name

    @property
    def is_host(self) -> bool:
        """Whether the package declares that its device is the processor itself."""
        return self.installed.package is not None and self.installed.package.is_host

    @property
    def is_present(self) -> bool:
        """Whether its probe found the hardware."""
        return self.report is not None and self.report.present

    @property
    def is_hidden(self) -> bool:
        """Whether it is present, but an environment variable hides all its devices from this
        process.
        """
        return self.is_present and self.probed().hiding is not None

    @property
    def is_usable(self) -> bool:
        """Whether its probe found that all four facts hold."""
        return self.report is not None and self.report.usable

    def probed(self) -> ProbeReport:
        """Return its probe report. Raises the error of loading or probing it, with its
        traceback.
        """
        if self.report is None:
            raise self.error or DeviceError(f"device {self.name!r} was not probed")
        return self.report

    def trouble(self) -> tuple[str, str]:
        """Return the error of loading or probing it in one line, and the remedy (its own, or else
        an upgrade with pip). Both are empty without an error.
        """
        if self.error is None:
            return "", ""
        where = "loaded" if self.installed.package is None else "probed"
        said = (
            self.error.found if isinstance(self.error, SglcoreError) else f"{type(self.error).__name__}: {self.error}"
        )
        remedy = self.error.remedy if isinstance(self.error, SglcoreError) else ""
        line = f"{self.installed.distribution} {self.installed.version} cannot be {where}: {said.strip()}"
        return line, remedy or pip("install --upgrade", self.installed.distribution)


def run_probe(package: DevicePackage, named: bool, system: System | None = None) -> ProbeReport:
    """Call a package's probe on `system` (None: `host_system()`); `named` says whether a user
    requested this device by name. Exceptions of the probe keep their traceback and get a note that
    names the package. Raises `DeviceError` if the probe ends the process, or returns no
    ProbeReport.
    """
    try:
        report = resolve(package.probe, package.name)(named, system or host_system())
    except SystemExit as error:
        raise DeviceError(f"the probe of {package.name!r} ends the process", wanted="a ProbeReport") from error
    except Exception as error:
        error.add_note(f"in the probe {package.probe!r} of device {package.name!r}")
        raise
    if not isinstance(report, ProbeReport):
        raise DeviceError(f"the probe of {package.name!r} returned a {type(report).__name__}", wanted="a ProbeReport")
    return report


def try_package(item: Installed, named: bool, system: System | None = None) -> Candidate:
    """Load and probe an installed package, and return its Candidate, with its probe report or with
    the exception that loading or probing it raised. `named`: a user requested this device by name;
    `system` None: `host_system()`.
    """
    try:
        return Candidate(item, run_probe(item.loaded(), named, system))
    except Exception as error:
        return Candidate(item, error=error)


def claims_of(installed: Sequence[Installed]) -> frozenset[PciClaim]:
    """Return the PCI claims of all packages that could be loaded."""
    return frozenset().union(*(item.package.pci for item in installed if item.package is not None))


def likely_devices(candidate: Candidate, known: frozenset[PciClaim], bus: Sequence[PciDevice]) -> tuple[PciDevice, ...]:
    """Return the PCI devices that a package which raised would probably have found.

    These are the devices that it claims and that are certainly accelerators. If it was not loaded,
    or claims nothing and is not the host, these are the accelerators of vendors that no claim in
    `known`, the claims of all loaded packages, covers.
    """
    package = candidate.installed.package
    if package is not None and (package.pci or package.is_host):
        return tuple(device for device in bus if any(claim.is_sure_of(device) for claim in package.pci))
    vendors = {claim.vendor_id for claim in known}
    return tuple(device for device in bus if device.is_accelerator and device.vendor_id not in vendors)
