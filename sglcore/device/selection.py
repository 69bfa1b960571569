"""Select the device: the named one, or the only usable accelerator, or the host if no accelerator
is present.

Several usable accelerators end the start. An accelerator that is present but not usable is a ledger
row if there is a usable one, or if a variable hides it from this process; otherwise it ends the
start. A package that raises, or has a probe that raises, is a ledger row too; it ends the start,
with its own traceback, only if no accelerator is usable, and the PCI bus shows a device that is
probably its own and certainly an accelerator, or no host device is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from sglcore.core.errors import DeviceError, SglcoreError
from sglcore.core.ledger import Row
from sglcore.device.candidate import Candidate, claims_of, likely_devices, try_package
from sglcore.device.choice import VARIABLE, ChosenDevice, Requested
from sglcore.device.discovery import Installed, pip
from sglcore.device.package import DevicePackage
from sglcore.device.pci import PciDevice, unclaimed_devices
from sglcore.device.probe import ProbeReport
from sglcore.device.system import System, host_system

_SETTING = f"--device NAME or {VARIABLE}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The selected device, its package and probe report, and the ledger rows of the decision."""

    chosen: ChosenDevice
    package: DevicePackage
    report: ProbeReport
    rows: tuple[Row, ...]


def select(
    installed: Sequence[Installed],
    requested: Requested,
    bus: Sequence[PciDevice] | None = None,
    system: System | None = None,
) -> Choice:
    """Probe the candidates on `system` (None: `host_system()`) and decide. `bus` has every PCI
    device (None: the system's). A named device is the only one probed, and its errors are raised.
    Otherwise raises what `decide` raises.
    """
    system = system or host_system()
    wanted = (find_installed(installed, requested),) if requested.name else installed
    candidates = tuple(try_package(item, bool(requested.name), system) for item in wanted)
    return decide(candidates, requested, system.pci() if bus is None else bus)


def decide(candidates: Sequence[Candidate], requested: Requested, bus: Sequence[PciDevice]) -> Choice:
    """Choose among probed candidates by the rules at the top of this file; `bus` has every PCI
    device. Raises `DeviceError`, or the error of a package or its probe.
    """
    if requested.name:
        return _named(candidates, requested)
    present = tuple(c for c in candidates if not c.is_host and c.is_present)
    accelerators = tuple(c for c in present if not c.is_hidden)
    hidden = [_hidden_row(c) for c in present if c.is_hidden]
    usable = tuple(c for c in accelerators if c.is_usable)
    if len(usable) > 1:
        raise DeviceError(
            f"found {len(usable)} usable accelerators: {_names(usable)}",
            wanted="one",
            remedy=f"set {VARIABLE} to one of {_names(usable)}, or give --device",
        )
    raised = tuple(c for c in candidates if c.error is not None)
    if usable:
        rows = [_unusable_row(c) for c in accelerators if not c.is_usable]
        rows += [_raised_row(c, usable[0].name, is_downgrade=False) for c in raised]
        rows += hidden
        return _choice(usable[0], requested, "it is the only usable accelerator", rows)
    if accelerators:
        raise _unusable(accelerators[0], f"{_SETTING} chooses another device")
    known = claims_of([c.installed for c in candidates])
    for candidate in raised:
        if likely := likely_devices(candidate, known, bus):
            _end(candidate, likely[0], candidates)
    return _host(candidates, raised, hidden, requested, unclaimed_devices(known, bus))


def find_installed(installed: Sequence[Installed], requested: Requested) -> Installed:
    """Return the installed package of the requested name. Raises `DeviceError`, which lists the
    installed ones.
    """
    for item in installed:
        if item.name == requested.name:
            return item
    raise DeviceError(
        f"device {requested.name!r}, from {requested.source}, is not installed",
        wanted=f"one of {', '.join(item.name for item in installed) or 'none, since no device package is installed'}",
        remedy=f"check the spelling, or pip install sglcore-{requested.name}",
    )


def _named(candidates: Sequence[Candidate], requested: Requested) -> Choice:
    item = find_installed([c.installed for c in candidates], requested)
    candidate = next(c for c in candidates if c.installed is item)
    if not candidate.probed().usable:
        raise _unusable(candidate, f"it was requested by {requested.source}")
    return _choice(candidate, requested, f"it was named by {requested.source}")


def _host(
    candidates: Sequence[Candidate],
    raised: Sequence[Candidate],
    hidden: Sequence[Row],
    requested: Requested,
    unclaimed: Sequence[PciDevice],
) -> Choice:
    hosts = tuple(c for c in candidates if c.is_host and c.report is not None)
    if not hosts:
        for candidate in raised:
            candidate.probed()
        told = "".join(f" ({row.topic}: {row.reason})" for row in hidden)
        raise DeviceError(
            f"found no accelerator among {_names(candidates) or 'no installed device packages'}{told}, "
            "and no host device",
            remedy=f"pip install sglcore-cpu, or name a device: {_SETTING}",
        )
    host, *others = hosts
    if others:
        raise DeviceError(f"found {len(hosts)} host devices: {_names(hosts)}", remedy=f"choose with {_SETTING}")
    if not host.is_usable:
        raise _unusable(host, "no accelerator is present either")
    rows = [_raised_row(c, host.name, is_downgrade=True) for c in raised]
    rows += [*hidden, *(_unclaimed_row(device, host.name) for device in unclaimed)]
    seen = (
        "every accelerator that is present is hidden" if hidden else "no accelerator of an installed package is present"
    )
    return _choice(host, requested, seen, rows)


def _choice(candidate: Candidate, requested: Requested, reason: str, others: Sequence[Row] = ()) -> Choice:
    item, package, report = candidate.installed, candidate.installed.loaded(), candidate.probed()
    index, count = _index(candidate, requested), len(report.devices)
    if requested.index is None and count > 1:
        reason = f"{reason}; the first of its {count} devices"
    chosen = ChosenDevice(package.name, item.distribution, item.version, package.api, reason, index)
    what = package.name if count <= 1 and requested.index is None else f"{package.name}:{index}"
    rows = [Row("device", str(requested), what, reason, remedy=f"choose another with {_SETTING}")]
    if report.hidden:
        remedy = "unset it, or name there which devices to show"
        rows.append(Row("visible devices", "all", str(count or "unknown"), report.hidden, remedy))
    if package.written_for is not None:
        rows.append(_adapted_row(package.written_for, package.api, item.distribution))
    return Choice(chosen, package, report, (*rows, *others))


def _index(candidate: Candidate, requested: Requested) -> int:
    """Return the requested index, or 0. Raises `DeviceError` if the probe lists devices and none
    has this index; if it lists none, the runtime checks the index.
    """
    report, name = candidate.probed(), candidate.name
    index = requested.index or 0
    if report.devices and index not in {device.index for device in report.devices}:
        there = ", ".join(f"{name}:{device.index} ({device})" for device in report.devices)
        hidden = f" ({report.hidden})" if report.hidden else ""
        raise DeviceError(
            f"there is no device {name}:{index}, from {requested.source}{hidden}", wanted=f"one of {there}"
        )
    return index


def _end(candidate: Candidate, likely: PciDevice, candidates: Sequence[Candidate]) -> NoReturn:
    """Raise the error of a package when its hardware `likely` is probably present, and add how to
    start without it: an SglcoreError as a new `DeviceError`, any other error itself with a note.
    """
    host = next((c.name for c in candidates if c.is_host and c.is_usable), "NAME")
    text, remedy = f"{likely} is probably a device of {candidate.name!r}", f"--device {host} starts without it"
    error = candidate.error
    if isinstance(error, SglcoreError):
        remedies = f"{error.remedy}, or {remedy}" if error.remedy else remedy
        raise DeviceError(f"{error.found}, and {text}", wanted=error.wanted, remedy=remedies) from error
    assert error is not None
    error.add_note(f"{text}; {remedy}")
    raise error


def _unusable_row(candidate: Candidate) -> Row:
    name, fact = candidate.probed().first_failure or ("", candidate.probed().hardware)
    reason = f"it is present, but its {name} is not usable: {fact.evidence}"
    return Row(f"accelerator {candidate.name}", "usable", "not used", reason, fact.remedy)


def _adapted_row(number: int, today: int, distribution: str) -> Row:
    reason = f"it was written for API {number}, which sglcore accepts until API {today + 1}"
    return Row("device package", f"API {today}", f"API {number}", reason, pip("install --upgrade", distribution))


def _hidden_row(candidate: Candidate) -> Row:
    fact = candidate.probed().hiding
    assert fact is not None
    return Row(f"accelerator {candidate.name}", "auto", "not used", f"it is hidden: {fact.evidence}", fact.remedy)


def _raised_row(candidate: Candidate, chosen: str, *, is_downgrade: bool) -> Row:
    line, remedy = candidate.trouble()
    told = "" if isinstance(candidate.error, SglcoreError) else " (sglcore doctor shows the traceback)"
    remedy = f"{remedy}{told}; --device {chosen} starts without it"
    return Row(f"device {candidate.name}", "usable", "not used", line, remedy, is_downgrade)


def _unclaimed_row(device: PciDevice, host: str) -> Row:
    return Row(
        f"accelerator {device.address}",
        "its device package",
        host,
        f"no installed package supports {device}",
        remedy=f"pip install the sglcore package of its vendor, or select {host} with --device or {VARIABLE}",
        downgrade=True,
    )


def _unusable(candidate: Candidate, after: str) -> DeviceError:
    report = candidate.probed()
    name, fact = report.first_failure or ("", report.hardware)
    state = "is present but not usable" if report.present else "is not present"
    remedy = f"{fact.remedy or 'see sglcore doctor'} ({after})"
    hidden = "" if report.hiding in (None, fact) else f"; it is also hidden: {report.hiding.evidence}"
    return DeviceError(f"device {candidate.name!r} {state}: {name}: {fact.evidence}{hidden}", remedy=remedy)


def _names(candidates: Sequence[Candidate]) -> str:
    return ", ".join(c.name for c in candidates)
