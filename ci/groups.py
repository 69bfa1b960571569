"""Groups of exhaustive tests: whole when what they cover has changed since their last whole pass, a sample otherwise.

A group is a row `[[group]]` of `devices/*/ci.toml` or `tests/ci.toml`. The digest of what it covered when it last passed
whole is kept in `ci/digests.json`; as long as it covers the same, a sample shows that this is still true.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ci.code import code_of
from ci.lanes import ROOT, Lane, LaneError, lanes

STORED = Path("ci") / "digests.json"
CONSTRAINTS = "constraints*.txt"
PLACES = ("devices/*/ci.toml", "tests/ci.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One row.

    `tests` are patterns of tests' names on `lane`, with their parameters where a pattern has a bracket (`[[]`);
    `sources` patterns of files that they cover beside their own, and `pins` packages of `constraints*.txt` whose versions they
    do. `share` is how many of 100 tests a sample takes; a test that makes many checks may run always, with `share = 100`, and
    take its own sample. `skips`: a test that says that the lane can not run it leaves the group whole, because others run it.
    A test is of the first group declared that has it.
    """

    name: str
    lane: str
    tests: tuple[str, ...]
    sources: tuple[str, ...]
    share: int
    pins: tuple[str, ...] = ()
    skips: bool = False

    def has(self, test: str) -> bool:
        """Whether a test, by pytest's name for it, is of this group."""
        name = test.partition("[")[0]
        return any(fnmatchcase(test if "[" in pattern else name, pattern) for pattern in self.tests)

    def digest(self, root: Path = ROOT) -> str:
        """What the group covers, in 64 letters: the code of its files with their names, and the versions of its packages."""
        total = hashlib.sha256()
        for path in self.files(root):
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + code_of(path) + b"\0")
        lines = [line for path in sorted(root.glob(CONSTRAINTS)) for line in path.read_text().splitlines()]
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
    """Every group in the order in which they are declared, those of packages first; raises LaneError."""
    known = lanes(root)
    found = [group for place in PLACES for path in sorted(root.glob(place)) for group in _read(path, known)]
    names = [group.name for group in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise LaneError(f"two rows declare the group {', '.join(twice)}; give each group a name of its own")
    return tuple(found)


def group_of(test: str, found: Sequence[Group]) -> Group | None:
    """The group of one lane's that a test is of."""
    return next((group for group in found if group.has(test)), None)


def _read(path: Path, known: Sequence[Lane]) -> list[Group]:
    rows = tomllib.loads(path.read_text()).get("group", ())
    return [_group(path, each) for row in rows for each in _on_lanes(row, known)]


def _on_lanes(row: dict[str, Any], known: Sequence[Lane]) -> list[dict[str, Any]]:
    """A row whose lane is a pattern is one for each lane on any machine, with that lane's name in its own and its device's
    in patterns of files."""
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
