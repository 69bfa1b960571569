"""Which device runs: the one that was named, or the only accelerator that is usable, or the host when none is present.

A device that is present but not usable ends the start; so does a probe or a package that raises, with its own traceback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from sglcore.device.choice import ChosenDevice
from sglcore.device.discovery import Installed
from sglcore.device.errors import DeviceError
from sglcore.device.ledger import Row
from sglcore.device.package import DevicePackage, resolve
from sglcore.device.pci import PciClaim, PciDevice, unclaimed_devices
from sglcore.device.probe import ProbeReport
from sglcore.device.system import System, host_system

Probe: TypeAlias = Callable[[DevicePackage, bool], ProbeReport]

VARIABLE = "SGLCORE_DEVICE"
_SETTING = f"--device NAME or {VARIABLE}"


@dataclass(frozen=True, slots=True)
class Requested:
    """The device that was asked for by name, and where; no name means that the choice is automatic."""

    name: str | None = None
    source: str = ""

    def __str__(self) -> str:
        """The request as a ledger row shows it."""
        return f"{self.name} (from {self.source})" if self.name else "automatic"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An installed package that loaded, and what its probe said."""

    installed: Installed
    package: DevicePackage
    report: ProbeReport


@dataclass(frozen=True, slots=True)
class Choice:
    """The device that runs, what its probe said, and the ledger rows of the decision."""

    chosen: ChosenDevice
    package: DevicePackage
    report: ProbeReport
    rows: tuple[Row, ...]


def requested_device(option: str | None, environ: Mapping[str, str] = os.environ) -> Requested:
    """The name given as `--device`, or else as `SGLCORE_DEVICE`; an empty value is no name."""
    if option:
        return Requested(option, "--device")
    name = environ.get(VARIABLE, "")
    return Requested(name, VARIABLE) if name else Requested()


def run_probe(package: DevicePackage, named: bool, system: System | None = None) -> ProbeReport:
    """Call a package's probe on `system` (None: `host_system()`). What it raises keeps its own traceback and gets a note
    that names the package."""
    try:
        report = resolve(package.probe, package.name)(named, system or host_system())
    except Exception as error:
        error.add_note(f"in the probe {package.probe!r} of device {package.name!r}")
        raise
    if not isinstance(report, ProbeReport):
        raise DeviceError(f"the probe of {package.name!r} gave a {type(report).__name__}", wanted="a ProbeReport")
    return report


def select(
    installed: Sequence[Installed],
    requested: Requested,
    unclaimed: Sequence[PciDevice] | None = None,
    probe: Probe | None = None,
    system: System | None = None,
) -> Choice:
    """Choose by the rules at the top of this file; raises `DeviceError`, or whatever a package or its probe raised.

    `unclaimed` are accelerators that no package answers for; by default the PCI bus of `system` is read (None:
    `host_system()`). `probe` is called as `probe(package, named)`; a caller that has probed already gives its own.
    """
    system = system or host_system()
    probe = probe or partial(run_probe, system=system)
    if requested.name:
        return _named(installed, requested, probe)
    candidates = tuple(_candidate(item, probe, named=False) for item in installed)
    accelerators = tuple(c for c in candidates if not c.package.is_host and c.report.present)
    usable = tuple(c for c in accelerators if c.report.usable)
    if len(usable) > 1:
        raise DeviceError(
            f"found {len(usable)} usable accelerators: {_names(usable)}",
            wanted="one",
            remedy=f"set {VARIABLE} to one of {_names(usable)}, or give --device",
        )
    if usable:
        broken = tuple(_broken_row(c) for c in accelerators if not c.report.usable)
        return _choice(usable[0], requested, "it is the only usable accelerator", broken)
    if accelerators:
        raise _unusable(accelerators[0], f"{_SETTING} chooses another device")
    if unclaimed is None:
        unclaimed = unclaimed_devices(claims_of(installed), system.pci())
    return _host(candidates, requested, unclaimed)


def find_installed(installed: Sequence[Installed], requested: Requested) -> Installed:
    """The installed package of the requested name; raises `DeviceError` that lists what is installed."""
    for item in installed:
        if item.name == requested.name:
            return item
    raise DeviceError(
        f"device {requested.name!r}, from {requested.source}, is not installed",
        wanted=f"one of {', '.join(item.name for item in installed) or 'none, since no device package is installed'}",
        remedy=f"check the spelling, or pip install sglcore-{requested.name}",
    )


def claims_of(installed: Sequence[Installed]) -> frozenset[PciClaim]:
    """What the packages that loaded claim of the PCI bus."""
    return frozenset().union(*(item.package.pci for item in installed if item.package is not None))


def _named(installed: Sequence[Installed], requested: Requested, probe: Probe) -> Choice:
    candidate = _candidate(find_installed(installed, requested), probe, named=True)
    if not candidate.report.usable:
        raise _unusable(candidate, f"it was asked for by {requested.source}")
    return _choice(candidate, requested, f"it was named by {requested.source}")


def _host(candidates: Sequence[Candidate], requested: Requested, unclaimed: Sequence[PciDevice]) -> Choice:
    hosts = tuple(c for c in candidates if c.package.is_host)
    if not hosts:
        raise DeviceError(
            f"found no accelerator among {_names(candidates) or 'no installed device packages'}, and no host device",
            remedy=f"pip install sglcore-cpu, or name a device: {_SETTING}",
        )
    host, *others = hosts
    if others:
        raise DeviceError(f"found {len(hosts)} host devices: {_names(hosts)}", remedy=f"choose with {_SETTING}")
    if not host.report.usable:
        raise _unusable(host, "no accelerator is present either")
    rows = tuple(_unclaimed_row(device, host.package.name) for device in unclaimed)
    return _choice(host, requested, "no accelerator of an installed package is present", rows)


def _candidate(item: Installed, probe: Probe, *, named: bool) -> Candidate:
    package = item.loaded()
    return Candidate(item, package, probe(package, named))


def _choice(candidate: Candidate, requested: Requested, reason: str, rows: tuple[Row, ...] = ()) -> Choice:
    item, package = candidate.installed, candidate.package
    chosen = ChosenDevice(package.name, item.distribution, item.version, package.api, reason)
    row = Row("device", str(requested), package.name, reason, remedy=f"choose another with {_SETTING}")
    return Choice(chosen, package, candidate.report, (row, *rows))


def _broken_row(candidate: Candidate) -> Row:
    name, fact = candidate.report.first_failure or ("", candidate.report.hardware)
    reason = f"it is present, but its {name} is not usable: {fact.evidence}"
    return Row(f"accelerator {candidate.package.name}", "usable", "not used", reason, fact.remedy)


def _unclaimed_row(device: PciDevice, host: str) -> Row:
    return Row(
        f"accelerator {device.address}",
        "its device package",
        host,
        f"no installed package answers for {device}",
        remedy=f"pip install the sglcore package of its vendor, or ask for {host} by --device or {VARIABLE}",
        downgrade=True,
    )


def _unusable(candidate: Candidate, after: str) -> DeviceError:
    name, fact = candidate.report.first_failure or ("", candidate.report.hardware)
    state = "is present but not usable" if candidate.report.present else "is not present"
    remedy = f"{fact.remedy or 'see sglcore doctor'} ({after})"
    return DeviceError(f"device {candidate.package.name!r} {state}: {name}: {fact.evidence}", remedy=remedy)


def _names(candidates: Sequence[Candidate]) -> str:
    return ", ".join(c.package.name for c in candidates)
