"""The distributions of a checkout, and their common version."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHANGES = "CHANGELOG.md"
VERSION = re.compile(r'^(?:__version__|version) = "([^"]+)"$', re.MULTILINE)
RELEASED = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
ENTRY = re.compile(r"^## (\S+) (\(.*\))$", re.MULTILINE)
"""The heading of a changelog entry: its version, and the day of its release."""
DAY = re.compile(r"\(\d{4}-\d\d-\d\d\)")
WHERE = "sglcore/__init__.py"
"""The file that defines the version; the others repeat it, because packages are also built alone
from their folders."""


class ReleaseError(RuntimeError):
    """Something can not be built or released; the text is one line with a remedy."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A published distribution: the folder of its `pyproject.toml`, and the file's content."""

    folder: Path
    declared: dict[str, Any]

    @property
    def name(self) -> str:
        """The name in an index, such as sglcore-cpu."""
        return self.declared["project"]["name"]

    @property
    def stem(self) -> str:
        """The beginning of its file names."""
        return self.name.replace("-", "_")


def distributions(root: Path = ROOT) -> tuple[Distribution, ...]:
    """Return the core, then the simulator and the device packages."""
    files = (
        root / "pyproject.toml",
        root / "simulator" / "pyproject.toml",
        *sorted(root.glob("devices/*/pyproject.toml")),
    )
    return tuple(Distribution(file.parent, tomllib.loads(file.read_text(encoding="utf-8"))) for file in files)


def version(root: Path = ROOT) -> str:
    """Return the common version. Raises ReleaseError if a package, or the first changelog entry,
    has another."""
    wanted = _found(root / WHERE)
    others = {file: _found(file) for file in _repeated(root)} | {root / CHANGES: _newest_entry(root)[0]}
    for file, found in others.items():
        if found != wanted:
            name = file.relative_to(root)
            raise ReleaseError(f"{name} has {found}, but {WHERE} has {wanted}; python -m tools.wheels version {wanted}")
    return wanted


def check_tag(tag: str, root: Path = ROOT) -> str:
    """Return the version if a tag names it and its changelog entry has the day of release. Raises
    ReleaseError."""
    found = version(root)
    if tag != f"v{found}":
        raise ReleaseError(f"found the tag {tag} at version {found}; wanted v{found}")
    if not DAY.fullmatch(day := _newest_entry(root)[1]):
        raise ReleaseError(f"{CHANGES} has {found} {day}; wanted the day of its release: ## {found} (YYYY-MM-DD)")
    return found


def write_version(new: str, root: Path = ROOT) -> None:
    """Write the version to all files except the changelog. Raises ReleaseError for an invalid
    version."""
    if not RELEASED.fullmatch(new):
        raise ReleaseError(f"found the version {new!r}; wanted one such as 1.2.3 or 1.2.3rc1")
    for file in (root / WHERE, *_repeated(root)):
        _found(file)
        text = file.read_text(encoding="utf-8")
        file.write_text(VERSION.sub(lambda match: match[0].replace(match[1], new), text, count=1), encoding="utf-8")


def _repeated(root: Path) -> list[Path]:
    return [each.folder / "pyproject.toml" for each in distributions(root) if each.folder != root]


def _found(file: Path) -> str:
    match = VERSION.search(file.read_text(encoding="utf-8"))
    if match is None:
        raise ReleaseError(f'{file} has no line version = "..."')
    return match[1]


def _newest_entry(root: Path) -> tuple[str, str]:
    """Return the version of the first changelog entry, and the text in brackets after it."""
    match = ENTRY.search((root / CHANGES).read_text(encoding="utf-8"))
    return (match[1], match[2]) if match else ("nothing", "")
