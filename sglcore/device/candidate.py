"""What is known of each installed package before one is chosen: what its probe says, or what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglcore.device.discovery import Installed, pip
from sglcore.device.errors import DeviceError, SglcoreError
from sglcore.device.package import DevicePackage, resolve
from sglcore.device.pci import PciClaim, PciDevice
from sglcore.device.probe import ProbeReport
from sglcore.device.system import System, host_system


@dataclass(frozen=True, slots=True)
class Candidate:
    """An installed package with what its probe said, or else what loading or probing it raised."""

    installed: Installed
    report: ProbeReport | None = None
    error: Exception | None = None

    @property
    def name(self) -> str:
        """What `--device` calls it."""
        return self.installed.name

    @property
    def is_host(self) -> bool:
        """It is known to be the processor itself."""
        return self.installed.package is not None and self.installed.package.is_host

    @property
    def is_present(self) -> bool:
        """Its probe saw the hardware."""
        return self.report is not None and self.report.present

    @property
    def is_hidden(self) -> bool:
        """It is present, and somebody hides every device of it from this process."""
        return self.is_present and self.probed().hiding is not None

    @property
    def is_usable(self) -> bool:
        """Its probe found that all four facts hold."""
        return self.report is not None and self.report.usable

    def probed(self) -> ProbeReport:
        """What its probe said; raises what loading or probing it raised, with the traceback that had."""
        if self.report is None:
            raise self.error or DeviceError(f"device {self.name!r} was not probed")
        return self.report

    def trouble(self) -> tuple[str, str]:
        """What loading or probing it raised, in a line, and the remedy; both empty if nothing."""
        if self.error is None:
            return "", ""
        where = "loaded" if self.installed.package is None else "probed"
        said = (
            self.error.found if isinstance(self.error, SglcoreError) else f"{type(self.error).__name__}: {self.error}"
        )
        remedy = self.error.remedy if isinstance(self.error, SglcoreError) else ""
        line = f"{self.installed.distribution} {self.installed.version} can not be {where}: {said.strip()}"
        return line, remedy or pip("install --upgrade", self.installed.distribution)


def run_probe(package: DevicePackage, named: bool, system: System | None = None) -> ProbeReport:
    """Call a package's probe on `system` (None: `host_system()`). What it raises keeps its own traceback and gets a note
    that names the package."""
    try:
        report = resolve(package.probe, package.name)(named, system or host_system())
    except SystemExit as error:
        raise DeviceError(f"the probe of {package.name!r} ends the process", wanted="a ProbeReport") from error
    except Exception as error:
        error.add_note(f"in the probe {package.probe!r} of device {package.name!r}")
        raise
    if not isinstance(report, ProbeReport):
        raise DeviceError(f"the probe of {package.name!r} gave a {type(report).__name__}", wanted="a ProbeReport")
    return report


def try_package(item: Installed, named: bool, system: System | None = None) -> Candidate:
    """Load and probe an installed package; raises nothing that it raises."""
    try:
        return Candidate(item, run_probe(item.loaded(), named, system))
    except Exception as error:
        return Candidate(item, error=error)


def claims_of(installed: Sequence[Installed]) -> frozenset[PciClaim]:
    """What the packages that loaded claim of the PCI bus."""
    return frozenset().union(*(item.package.pci for item in installed if item.package is not None))


def likely_devices(candidate: Candidate, known: frozenset[PciClaim], bus: Sequence[PciDevice]) -> tuple[PciDevice, ...]:
    """The devices on the bus that a package which raised would probably have found: those that it claims and that are
    accelerators beyond doubt, or, where it can not say, the accelerators of vendors of which nothing in `known`, the claims
    of all that loaded, is."""
    package = candidate.installed.package
    if package is not None and (package.pci or package.is_host):
        return tuple(device for device in bus if any(claim.is_sure_of(device) for claim in package.pci))
    vendors = {claim.vendor_id for claim in known}
    return tuple(device for device in bus if device.is_accelerator and device.vendor_id not in vendors)
