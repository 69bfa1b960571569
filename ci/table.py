"""The table of tests and lanes: what ran where and when, the reasons for what did not run, and the
known gaps. A test that ran on no lane is an error, unless a lane that does not always run could run
it: then it is counted as waiting for that lane."""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ci.groups import groups
from ci.lanes import ROOT, Lane, lanes
from ci.sharing import ELSEWHERE

RAN = ("passed", "failed")
_KIT = re.compile(r"^devices/[^/]+/tests/test_conformance\.py")


@dataclass(frozen=True, slots=True)
class Cell:
    """The outcome of one test on one lane: "passed", "failed", "skipped" with the reason, "left
    out" with the capabilities that the lane lacks in `missing`, "not taken" (another turn takes
    it), or "elsewhere" (it is another lane's turn). `at`: time of the run, seconds since 1970."""

    outcome: str
    at: int
    reason: str = ""
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Table:
    """Outcomes by test and lane. `lanes`: those with a record; `gaps`: by device package, the laws
    that it declares as not satisfied; `declared`: all lanes."""

    lanes: tuple[str, ...]
    tests: Mapping[str, Mapping[str, Cell]]
    gaps: Mapping[str, tuple[str, ...]]
    declared: tuple[Lane, ...] = ()

    @property
    def never_ran(self) -> tuple[str, ...]:
        """Tests that no lane ran, that are not left to another turn, and that wait for no other
        lane."""
        return tuple(test for test in self._idle if not self._is_sampled(test) and not self.waits_for(test))

    @property
    def not_taken(self) -> int:
        """How many tests ran on no lane because they are left to another turn."""
        return sum(map(self._is_sampled, self._idle))

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many tests wait for each lane that was not run."""
        found = Counter(self.waits_for(test) for test in self._idle)
        return {lane: count for lane, count in sorted(found.items()) if lane}

    @property
    def _idle(self) -> list[str]:
        ran = {test for test, cells in self.tests.items() if any(cell.outcome in RAN for cell in cells.values())}
        anywhere = {everyones(test) for test in self.tests if test in ran or self._is_sampled(test)}
        idle = sorted(self.tests.keys() - ran)
        return [test for test in idle if not (self._has(test, "elsewhere") and everyones(test) in anywhere)]

    def _is_sampled(self, test: str) -> bool:
        return self._has(test, "not taken")

    def _has(self, test: str, outcome: str) -> bool:
        return any(cell.outcome == outcome for cell in self.tests[test].values())

    def waits_for(self, test: str) -> str:
        """Return the lane that can run a test later, or "": a lane with hardware or of a group that
        was not run, of the same device as a lane that left the test out, with all capabilities that
        this one lacks."""
        devices = {lane.name: lane.device for lane in self.declared}
        for name, cell in self.tests[test].items():
            for lane in self.declared:
                is_apart = lane.needs_hardware or lane.group
                is_twin = is_apart and lane.name not in self.lanes and lane.device == devices.get(name)
                if is_twin and cell.missing and cell.missing <= lane.capabilities:
                    return lane.name
        return ""

    def why_not(self, test: str) -> str:
        """Return each lane's reason for not running a test."""
        return "; ".join(f"{lane}: {cell.reason}" for lane, cell in self.tests[test].items())


def read(records: Sequence[Path], root: Path = ROOT) -> Table:
    """Read the records of lanes into a table."""
    tests: dict[str, dict[str, Cell]] = defaultdict(dict)
    names: list[str] = []
    known_groups = groups(root)
    for path in records:
        values = json.loads(path.read_text())
        lane, at = values["lane"], values["at"]
        names.append(lane)
        sampled = [group for group in known_groups if group.name in values.get("sampled", ())]
        for test, known in values["tests"].items():
            is_part = known["outcome"] == "skipped" and any(group.has(test) for group in sampled)
            outcome = "not taken" if is_part else known["outcome"]
            tests[shared(test)][lane] = Cell(outcome, at, known.get("reason", ""))
        for test, missing in values["left_out"].items():
            tests[shared(test)][lane] = Cell("left out", at, f"needs {', '.join(missing)}", frozenset(missing))
        for test, reason in values.get("not_taken", {}).items():
            outcome = "elsewhere" if reason == ELSEWHERE else "not taken"
            tests[shared(test)][lane] = Cell(outcome, at, reason)
    return Table(tuple(names), dict(tests), gaps(root), lanes(root))


def everyones(test: str) -> str:
    """Return a test's name with `*` in place of its device package: lanes of several packages share
    tests of the same name."""
    return re.sub(r"^devices/[^/]+/", "devices/*/", test)


def shared(test: str) -> str:
    """Return the name of a test's row: laws of the conformance kit get one row for all packages."""
    return _KIT.sub("devices/*/tests/test_conformance.py", test)


def gaps(root: Path) -> dict[str, tuple[str, ...]]:
    """Read the laws in each package's `gaps.toml`, by device."""
    found = {}
    for path in sorted(root.glob("devices/*/*/gaps.toml")):
        found[path.parent.parent.name] = tuple(row["law"] for row in tomllib.loads(path.read_text()).get("gap", ()))
    return found


_MARKS = MappingProxyType(
    {"passed": "yes", "failed": "FAILED", "skipped": "skip", "left out": "-", "not taken": ".", "elsewhere": "."}
)


def markdown(table: Table) -> str:
    """Return the table in Markdown: one row per test, then the reasons of skips, and the gaps."""
    when: dict[str, float] = {}
    for cells in table.tests.values():
        when |= {lane: max(cell.at, when.get(lane, 0.0)) for lane, cell in cells.items()}
    lines = [
        "# Tests and lanes",
        "",
        "Last run: "
        + ", ".join(
            f"{lane} {time.strftime('%Y-%m-%d %H:%M', time.gmtime(at))} UTC" for lane, at in sorted(when.items())
        ),
        "",
        f"| test | {' | '.join(table.lanes)} |",
        f"|---|{'---|' * len(table.lanes)}",
    ]
    for test, cells in sorted(table.tests.items()):
        marks = [_MARKS[cells[lane].outcome] if lane in cells else "-" for lane in table.lanes]
        lines.append(f"| {test.replace('|', '/')} | {' | '.join(marks)} |")
    skips = [
        f"- {test} on {lane}: {cell.reason}"
        for test, cells in sorted(table.tests.items())
        for lane, cell in cells.items()
        if cell.outcome == "skipped"
    ]
    known = [f"- {device}: {', '.join(laws)}" for device, laws in table.gaps.items() if laws]
    return "\n".join([*lines, "", "## Skipped", *(skips or ["none"]), "", "## Gaps", *(known or ["none"]), ""])


def summary(table: Table) -> str:
    """Return the numbers of tests that ran, by folder and lane, as text."""
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for test, cells in table.tests.items():
        parts = test.split("::")[0].split("/")
        folder = "/".join(parts[: 3 if parts[0] == "devices" else 2])
        for lane, cell in cells.items():
            counts[folder][lane] += cell.outcome in RAN
    width = max([len("tests that ran"), *map(len, counts)])
    lines = ["", f"{'tests that ran':<{width}}  " + "  ".join(f"{lane:>10}" for lane in table.lanes)]
    for folder, by_lane in sorted(counts.items()):
        lines.append(f"{folder:<{width}}  " + "  ".join(f"{by_lane[lane] or '-':>10}" for lane in table.lanes))
    return "\n".join(lines)
