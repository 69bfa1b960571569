"""The command `sglcore devices`: the installed device packages, what they detect, and which would
be used."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import typer

from sglcore.core.errors import DeviceError
from sglcore.device.candidate import Candidate, claims_of, try_package
from sglcore.device.choice import Requested, requested_device
from sglcore.device.discovery import Installed, discover
from sglcore.device.package import resolve
from sglcore.device.pci import PciDevice, unclaimed_devices
from sglcore.device.selection import Choice, decide, find_installed
from sglcore.device.system import host_system


@dataclass(frozen=True, slots=True)
class Survey:
    """The installed device packages, the one that would be used (`choice`), and the accelerators
    that no package supports (`unclaimed`).

    If none can be chosen, `choice` is None, and `refusal` is the error that says why.
    """

    devices: tuple[Candidate, ...]
    choice: Choice | None
    refusal: Exception | None
    unclaimed: tuple[PciDevice, ...]

    def is_chosen(self, item: Candidate) -> bool:
        """Return whether the package of this candidate would be used; False for all if none can be
        chosen."""
        return self.choice is not None and self.choice.chosen.name == item.name


def devices(
    name: str = typer.Argument("", help="Show only this device."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    bring_up: bool = typer.Option(False, "--bring-up", help="Print only the start-up steps of the device. Needs NAME."),
) -> None:
    """List the device packages, what they detect on this machine, and which one would be used."""
    from sglcore.cli import render

    found = discover()
    requested = Requested.parse(name, "the argument") if name else Requested()
    if bring_up:
        typer.echo(bring_up_text(found, requested), nl=False)
        return
    if name:
        find_installed(found, requested)
    seen = survey(found, requested_device(None), requested)
    if name:
        seen = replace(seen, devices=tuple(item for item in seen.devices if item.name == requested.name))
    if as_json:
        typer.echo(render.json_text(survey_values(seen)))
    else:
        render.show_survey(seen)


def bring_up_text(found: tuple[Installed, ...], requested: Requested) -> str:
    """Return the start-up steps of the requested device, in order, as text that ends with a
    newline.

    Raises `DeviceError` if `requested` names no device or one that is not installed, and the error
    of a package that cannot be loaded.
    """
    if requested.name is None:
        names = ", ".join(item.name for item in found) or "none"
        raise DeviceError(
            "--bring-up without a device", wanted=f"one of {names}", remedy="sglcore devices NAME --bring-up"
        )
    package = find_installed(found, requested).loaded()
    return resolve(package.bring_up, package.name).text()


def survey(found: tuple[Installed, ...], requested: Requested, shown: Requested = Requested()) -> Survey:
    """Probe every package of `found`, and choose as a start with `requested` would.

    Raises nothing: an error of a package is kept in its Candidate, so that it does not hide the
    others, and a failed choice in `refusal`. The package that `shown` names is probed a second time
    as if the user had requested it; this does not change the choice.
    """
    system = host_system()
    bus = system.pci()
    seen = tuple(try_package(item, item.name == requested.name, system) for item in found)
    choice, refusal = None, None
    try:
        choice = decide(seen, requested, bus)
    except Exception as error:
        refusal = error
    named = (try_package(item.installed, True, system) if item.name == shown.name else item for item in seen)
    return Survey(tuple(named), choice, refusal, unclaimed_devices(claims_of(found), bus))


def survey_values(seen: Survey) -> Mapping[str, object]:
    """Return the survey as plain values, for JSON: the choice and its ledger rows, the refusal as
    text, the packages with facts and tracebacks, and unclaimed accelerators."""
    return {
        "chosen": asdict(seen.choice.chosen) if seen.choice else None,
        "rows": [asdict(row) for row in seen.choice.rows] if seen.choice else [],
        "refusal": str(seen.refusal) if seen.refusal else None,
        "devices": [_device_values(item, seen) for item in seen.devices],
        "unclaimed": [asdict(device) for device in seen.unclaimed],
    }


def _device_values(item: Candidate, seen: Survey) -> Mapping[str, object]:
    package, report, error = item.installed.package, item.report, item.error
    return {
        "name": item.name,
        "distribution": item.installed.distribution,
        "version": item.installed.version,
        "api": package.api if package else None,
        "summary": package.summary if package else None,
        "is_chosen": seen.is_chosen(item),
        "facts": {name: asdict(fact) for name, fact in report.facts.items()} if report else None,
        "details": dict(report.details) if report else {},
        "devices": [asdict(device) for device in report.devices] if report else [],
        "hidden": report.hidden if report else "",
        "error": str(error) if error else None,
        "traceback": "".join(traceback.format_exception(error)) if error else None,
    }
