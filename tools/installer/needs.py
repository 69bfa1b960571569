"""What a device package says about torch in its `pyproject.toml`, `[tool.sglcore.torch]`: versions,
builds, what goes beside it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANGE = re.compile(r"torch\s*>=\s*(\d+)\.(\d+)\s*,\s*<\s*(\d+)\.(\d+)")


class InstallError(Exception):
    """An installation that can not go on: one line that says what was found, what was wanted and
    what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One build of torch, a row `[[tool.sglcore.torch.builds]]`."""

    name: str
    """What it is, in words."""
    systems: tuple[str, ...]
    """Where it runs, as `platform.system()` names them."""
    index: str = ""
    """The package index that has it; "": the one that pip asks anyway."""
    label: str = ""
    """The part of its version after the +; "": it has none."""
    megabytes: tuple[int, int]
    """About how much is downloaded with all that it brings, and how much that is on disk."""
    versions: tuple[str, ...] = ()
    """Those that it serves, where something beside torch asks for another build of the others;
    empty: all."""
    brings_triton: bool = True
    """It asks for the Triton that belongs to it."""

    def serves(self, number: str, system: str) -> bool:
        """Whether it is one for this version and system."""
        return system in self.systems and (not self.versions or number in self.versions)

    def version(self, number: str) -> str:
        """Its version as the index has it."""
        return f"{number}+{self.label}" if self.label else number


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchNeeds:
    """The table of one package. Builds are in the order in which they are tried: the next one
    serves where the index of one does not answer, so the last has none unless nothing else
    serves."""

    package: str
    versions: tuple[str, ...]
    """What it supports, the preferred first."""
    builds: tuple[Build, ...]
    beside: tuple[str, ...] = ()
    """Requirements that go with torch, with {torch} for its version."""
    vendor: tuple[str, ...] = ()
    """Distributions of the vendor's: where one is installed, the torch there is the vendor's
    too."""
    note: str = ""
    """What else a person has to install where none of them is."""


def needs_of(folder: Path) -> TorchNeeds | None:
    """What the package in a folder says; None: it needs no torch. Raises InstallError for a table
    that can not be read."""
    declared = settings(folder).get("torch")
    if declared is None:
        return None
    try:
        rows = [_build(**row) for row in declared["builds"]]
        own = {name: tuple(declared.get(name, ())) for name in ("versions", "beside", "vendor")}
        unknown = sorted(declared.keys() - own.keys() - {"builds", "note"})
        if unknown or not rows or not own["versions"]:
            raise TypeError(f"unknown {', '.join(unknown)}" if unknown else "no versions or no builds")
        return TorchNeeds(package=folder.name, builds=tuple(rows), note=declared.get("note", ""), **own)
    except (KeyError, TypeError) as error:
        known = "versions, builds, beside, vendor, note"
        raise InstallError(f"{folder}/pyproject.toml: [tool.sglcore.torch]: {error}; it has {known}") from None


def _build(*, systems: list[str], megabytes: list[int], versions: Sequence[str] = (), **others: Any) -> Build:
    download, disk = megabytes
    return Build(systems=tuple(systems), megabytes=(download, disk), versions=tuple(versions), **others)


def settings(folder: Path) -> Mapping[str, Any]:
    """`[tool.sglcore]` of the package in a folder."""
    return tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {}).get("sglcore", {})


def takes(folder: Path, version: str) -> bool:
    """Whether the dependencies of the package in a folder allow a torch; one that names none allows
    all."""
    asked = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {}).get("dependencies", ())
    found = [match for text in asked if (match := RANGE.match(text))]
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return all((int(a), int(b)) <= release < (int(c), int(d)) for a, b, c, d in (match.groups() for match in found))
