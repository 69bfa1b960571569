"""Reads a device package's requirements on torch, `[tool.sglcore.torch]` of its `pyproject.toml`:
versions, builds, and packages to install with it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANGE = re.compile(r"torch\s*>=\s*(\d+)\.(\d+)\s*,\s*<\s*(\d+)\.(\d+)")


class InstallError(Exception):
    """The installation can not continue; the text is one line: what was found, what is needed, and
    what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One build of torch, a row `[[tool.sglcore.torch.builds]]`."""

    name: str
    """A description."""
    systems: tuple[str, ...]
    """Operating systems that it supports, by the names of `platform.system()`."""
    index: str = ""
    """The package index that has it; "": pip's configured index."""
    label: str = ""
    """The part of its version after the +; "": none."""
    megabytes: tuple[int, int]
    """Approximate size of the download with dependencies, and its size on disk."""
    versions: tuple[str, ...] = ()
    """Versions of torch that use this build, if another package needs another build for the rest;
    empty: all."""
    brings_triton: bool = True
    """Whether it depends on its own Triton."""

    def serves(self, number: str, system: str) -> bool:
        """Return whether it supports this version and system."""
        return system in self.systems and (not self.versions or number in self.versions)

    def version(self, number: str) -> str:
        """Return its version with the label, as in the index."""
        return f"{number}+{self.label}" if self.label else number


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchNeeds:
    """The table of one package. Builds are tried in order: if a build's index does not answer, the
    next build is used. The last build therefore has no index of its own, unless only that works."""

    package: str
    versions: tuple[str, ...]
    """Supported versions, the preferred first."""
    builds: tuple[Build, ...]
    beside: tuple[str, ...] = ()
    """Requirements to install with torch; {torch} stands for its version."""
    vendor: tuple[str, ...] = ()
    """Distributions of the vendor: if one is installed, the installed torch is the vendor's."""
    note: str = ""
    """What else the user must install if no vendor distribution is installed."""


def needs_of(folder: Path) -> TorchNeeds | None:
    """Read the table of the package in a folder; None: it needs no torch. Raises InstallError for
    an invalid table."""
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
    """Read `[tool.sglcore]` of the package in a folder."""
    return tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {}).get("sglcore", {})


def takes(folder: Path, version: str) -> bool:
    """Return whether the dependencies of the package in a folder allow a version of torch; without
    a range of torch they allow all."""
    asked = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {}).get("dependencies", ())
    found = [match for text in asked if (match := RANGE.match(text))]
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return all((int(a), int(b)) <= release < (int(c), int(d)) for a, b, c, d in (match.groups() for match in found))
