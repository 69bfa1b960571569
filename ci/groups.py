"""Groups of exhaustive tests: whole when what they cover has changed since their last whole pass, a sample otherwise.

A group is a row `[[group]]` of `devices/*/ci.toml` or `tests/ci.toml`. The digest of what it covered when it last passed
whole is kept in `ci/digests.json`; as long as it covers the same, a sample shows that this is still true.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ci.code import code_of
from ci.lanes import ROOT, LaneError

STORED = Path("ci") / "digests.json"
CONSTRAINTS = "constraints.txt"
PLACES = ("devices/*/ci.toml", "tests/ci.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One row.

    `tests` are patterns of tests' names on `lane`, with their parameters where a pattern has a bracket (`[[]`);
    `sources` patterns of files that they cover beside their own, and `pins` packages of `constraints.txt` whose versions they
    do. `share` is how many of 100 tests a sample takes; a test that makes many checks may run always, with `share = 100`, and
    take its own sample.
    """

    name: str
    lane: str
    tests: tuple[str, ...]
    sources: tuple[str, ...]
    share: int
    pins: tuple[str, ...] = ()

    def has(self, test: str) -> bool:
        """Whether a test, by pytest's name for it, is of this group."""
        name = test.partition("[")[0]
        return any(fnmatchcase(test if "[" in pattern else name, pattern) for pattern in self.tests)

    def digest(self, root: Path = ROOT) -> str:
        """What the group covers, in 64 letters: the code of its files with their names, and the versions of its packages."""
        total = hashlib.sha256()
        for path in self.files(root):
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + code_of(path) + b"\0")
        constraints = root / CONSTRAINTS
        lines = constraints.read_text().splitlines() if constraints.is_file() else []
        for line in sorted(line for line in lines if line.partition("==")[0] in self.pins):
            total.update(line.encode() + b"\0")
        return total.hexdigest()

    def files(self, root: Path = ROOT) -> list[Path]:
        """What `sources` and `tests` name, in order."""
        patterns = {*self.sources, *(pattern.partition("::")[0] for pattern in self.tests)}
        found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
        return sorted(path for path in found if path.suffix not in (".pyc", ".so"))

    def is_fresh(self, root: Path = ROOT) -> bool:
        """It covers what it covered when it last passed whole."""
        return stored(root).get(self.name) == self.digest(root)


def groups(root: Path = ROOT) -> tuple[Group, ...]:
    """Every group, by name; raises LaneError."""
    found = [group for place in PLACES for path in sorted(root.glob(place)) for group in _read(path)]
    names = [group.name for group in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaneError(f"two rows declare the group {', '.join(twice)}; give each group a name of its own")
    return tuple(sorted(found, key=lambda group: group.name))


def _read(path: Path) -> list[Group]:
    return [_group(path, row) for row in tomllib.loads(path.read_text()).get("group", ())]


def _group(path: Path, row: dict[str, Any]) -> Group:
    known, needed = set(Group.__dataclass_fields__), {"name", "lane", "tests", "sources", "share"}
    wrong = sorted(row.keys() - known) + sorted(needed - row.keys())
    if wrong:
        raise LaneError(
            f"{path}: unknown or missing in a group: {', '.join(wrong)}; a group has {', '.join(sorted(known))}"
        )
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Group(**values)


def group_named(name: str, found: tuple[Group, ...]) -> Group:
    """One group; an unknown name is an error that lists the known ones."""
    for group in found:
        if group.name == name:
            return group
    raise LaneError(f"there is no group {name!r}; there are: {', '.join(group.name for group in found)}")


def stored(root: Path = ROOT) -> Mapping[str, str]:
    """What each group covered when it last passed whole."""
    path = root / STORED
    return json.loads(path.read_text()) if path.is_file() else {}


def store(digests: Mapping[str, str], root: Path = ROOT) -> None:
    """Keep the digests of groups that have passed whole; a group that is no longer declared is forgotten."""
    known = {group.name for group in groups(root)}
    kept = {name: digest for name, digest in {**stored(root), **digests}.items() if name in known}
    (root / STORED).write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def passed_whole(record: Mapping[str, Any]) -> dict[str, str]:
    """Of a lane's record: the digests of the groups that ran whole, of which nothing failed or was skipped."""
    outcomes = {test: known["outcome"] for test, known in record["tests"].items()}
    found = {}
    for group in groups():
        own = [outcome for test, outcome in outcomes.items() if group.has(test)]
        if group.name in record["whole"] and own and set(own) == {"passed"}:
            found[group.name] = record["whole"][group.name]
    return found
