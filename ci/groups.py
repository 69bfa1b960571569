"""Closed groups: many tests that cover few files. A group runs whole when one of these files has
changed, and otherwise one part of it per turn.

A group is a row `[[group]]` of `devices/*/ci.toml` or `tests/ci.toml`. `ci/digests/NAME` is the
digest of the covered files when the group last passed whole. A run that computes another digest
runs the group whole and, if it passes, writes the file.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ci.code import code_of
from ci.lanes import ROOT, Lane, LaneError, lanes

STORED = Path("ci") / "digests"
CONSTRAINTS = "constraints*.txt"
PLACES = ("devices/*/ci.toml", "tests/ci.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One row. A test belongs to the first declared group that matches it."""

    name: str
    """The group's name, and the name of its file below `ci/digests`."""
    lane: str
    """The lane that runs it. A pattern makes one group, `NAME-LANE`, for each matching lane that
    needs no hardware; `{device}` in `tests` and `sources` is then that lane's device."""
    tests: tuple[str, ...]
    """Patterns of test names; a pattern with a bracket (`[[]`) also matches parameters."""
    sources: tuple[str, ...]
    """Patterns of files that the tests cover, in addition to the test files."""
    share: int
    """Percentage of the tests that each turn takes while nothing has changed. A test with many
    checks can have 100 and select a part of its checks with the fixture `selection`."""
    pins: tuple[str, ...] = ()
    """Packages in `constraints*.txt`; their versions are part of the digest."""
    skips: bool = False
    """A skipped test does not prevent that the group has passed whole, because another lane runs
    that test."""

    def has(self, test: str) -> bool:
        """Return whether a test, by its pytest node id, matches this group."""
        name = test.partition("[")[0]
        return any(fnmatchcase(test if "[" in pattern else name, pattern) for pattern in self.tests)

    def digest(self, root: Path = ROOT) -> str:
        """Return the SHA-256 (64 hex digits) of what the group covers: the names and code of its
        files, and the versions of `pins`."""
        total = hashlib.sha256()
        for path in self.files(root):
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + code_of(path) + b"\0")
        lines = [line for path in sorted(root.glob(CONSTRAINTS)) for line in path.read_text().splitlines()]
        for line in sorted(line for line in lines if line.partition("==")[0] in self.pins):
            total.update(line.encode() + b"\0")
        return total.hexdigest()

    def files(self, root: Path = ROOT) -> list[Path]:
        """Return the files that `sources` and `tests` match, sorted."""
        patterns = {*self.sources, *(pattern.partition("::")[0] for pattern in self.tests)}
        found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
        return sorted(path for path in found if path.suffix not in (".pyc", ".so"))

    def is_fresh(self, root: Path = ROOT) -> bool:
        """Return whether nothing it covers has changed since it last passed whole."""
        return stored(root).get(self.name) == self.digest(root)


def groups(root: Path = ROOT) -> tuple[Group, ...]:
    """Return all groups in declaration order, device packages first. Raises LaneError."""
    known = lanes(root)
    found = [group for place in PLACES for path in sorted(root.glob(place)) for group in _read(path, known)]
    names = [group.name for group in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaneError(f"two rows declare the group {', '.join(twice)}; give each group a name of its own")
    return tuple(found)


def group_of(test: str, found: Sequence[Group]) -> Group | None:
    """Return the first of a lane's groups that matches a test; None if none does."""
    return next((group for group in found if group.has(test)), None)


def _read(path: Path, known: Sequence[Lane]) -> list[Group]:
    rows = tomllib.loads(path.read_text()).get("group", ())
    return [_group(path, each) for row in rows for each in _on_lanes(row, known)]


def _on_lanes(row: dict[str, Any], known: Sequence[Lane]) -> list[dict[str, Any]]:
    """Expand a row with a pattern as lane into one row for each matching lane that needs no
    hardware and is no group's; other rows stay as they are."""
    pattern = str(row.get("lane", ""))
    if "*" not in pattern:
        return [row]
    own = [lane for lane in known if fnmatchcase(lane.name, pattern) and not lane.needs_hardware and not lane.group]
    return [_on(lane, row) for lane in own]


def _on(lane: Lane, row: dict[str, Any]) -> dict[str, Any]:
    parts = {part: [text.replace("{device}", lane.device) for text in row[part]] for part in ("tests", "sources")}
    folders = lane.tests
    parts["tests"] = [text for text in parts["tests"] if any(Path(text).is_relative_to(folder) for folder in folders)]
    return {**row, **parts, "name": f"{row['name']}-{lane.name}", "lane": lane.name}


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
    """Return the group of a name. Raises LaneError with the known names."""
    for group in found:
        if group.name == name:
            return group
    raise LaneError(f"there is no group {name!r}; there are: {', '.join(group.name for group in found)}")


def stored(root: Path = ROOT) -> Mapping[str, str]:
    """Read the digest of each group from when it last passed whole."""
    return {path.name: path.read_text().strip() for path in (root / STORED).glob("*")}


def store(digests: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """Write the digests of groups that have passed whole, and delete those of groups that are no
    longer declared. Returns the names of groups with a changed digest."""
    known, before = {group.name for group in groups(root)}, stored(root)
    changed = sorted(name for name, digest in digests.items() if name in known and before.get(name) != digest)
    (root / STORED).mkdir(exist_ok=True)
    for name in changed:
        (root / STORED / name).write_text(digests[name] + "\n")
    for name in before.keys() - known:
        (root / STORED / name).unlink()
    return changed


def passed_whole(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the groups that ran whole in a lane's record, and all tests passed
    (skips are allowed in groups with `skips`)."""
    own = [group for group in groups() if group.lane == record["lane"]]
    outcomes: dict[str, set[str]] = {group.name: set() for group in own}
    for test, known in record["tests"].items():
        group = group_of(test, own)
        if group is not None:
            outcomes[group.name].add(known["outcome"])
    passed = {
        group.name for group in own if outcomes[group.name] - ({"skipped"} if group.skips else set()) == {"passed"}
    }
    return {name: digest for name, digest in record["whole"].items() if name in passed}
