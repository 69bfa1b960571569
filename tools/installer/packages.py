"""The device packages of a checkout: their probe results, and which of them are installed."""

from __future__ import annotations

import importlib
import sys
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

from tools.installer.needs import InstallError

if TYPE_CHECKING:
    from sglcore.device.package import DevicePackage
    from sglcore.device.probe import ProbeReport


@dataclass(frozen=True, slots=True)
class Found:
    """A folder of `devices/` with its probe's report, or the raised error."""

    folder: Path
    package: DevicePackage | None = None
    report: ProbeReport | None = None
    error: Exception | None = None

    @property
    def is_host(self) -> bool:
        """Whether it is the CPU package."""
        return self.package is not None and self.package.is_host

    @property
    def is_seen(self) -> bool:
        """Whether it is an accelerator's package and the hardware is present."""
        return not self.is_host and self.report is not None and self.report.present


def find(root: Path) -> tuple[Found, ...]:
    """Probe every package of a checkout; exceptions are kept in `error`."""
    return tuple(examine(path.parent) for path in sorted(root.glob("devices/*/pyproject.toml")))


def examine(folder: Path) -> Found:
    """Load one package's declaration from its folder and call its probe; an exception is kept in
    `error`."""
    from sglcore.device.candidate import run_probe
    from sglcore.device.discovery import GROUP, discover

    try:
        declared = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        points = [EntryPoint(name, value, GROUP) for name, value in declared.items()]
        package = discover(points)[0].loaded()
        return Found(folder, package, run_probe(package, False))
    except Exception as error:
        return Found(folder, error=error)


def chosen(found: Sequence[Found], names: Sequence[str]) -> tuple[Found, ...]:
    """Return the accelerators to install: the named ones, or without names those that are present.
    Raises InstallError for an unknown name."""
    known = {item.folder.name: item for item in found}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InstallError(f"there is no device {', '.join(unknown)}; name by --device one of {', '.join(known)}")
    named = tuple(known[name] for name in dict.fromkeys(names))
    return tuple(item for item in named if not item.is_host) if names else tuple(item for item in found if item.is_seen)


def show(item: Found, is_wanted: bool) -> None:
    """Print the probe's facts, or the traceback of its error."""
    if item.error is not None:
        print(f"{item.folder.name}: raised")
        traceback.print_exception(item.error)
    if item.package is None or item.report is None:
        return
    state = "to be installed" if is_wanted else "not on this machine"
    print(f"{item.package.name}: {item.package.summary}: {state}")
    for name, fact in item.report.facts.items():
        print(f"  {name:<9} {'yes' if fact.holds else 'no ':<4} {fact.evidence}")
