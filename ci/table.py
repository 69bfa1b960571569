"""The table of tests and lanes: what ran where, when, why not, and which gap is known. A test that
ran nowhere is red, unless a lane that is not always run could: then it waits for that, and is
counted."""

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
    """What happened to one test on one lane: "passed", "failed", "skipped" with its reason, "left
    out" with what the lane lacks, by name in `missing`, "not taken" by a sample, or "elsewhere"
    where another lane's turn it is; `at` is when, in seconds since 1970."""

    outcome: str
    at: int
    reason: str = ""
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Table:
    """Tests by lane. `gaps` are the laws that a lane's package declares it does not hold;
    `declared` are all lanes."""

    lanes: tuple[str, ...]
    tests: Mapping[str, Mapping[str, Cell]]
    gaps: Mapping[str, tuple[str, ...]]
    declared: tuple[Lane, ...] = ()

    @property
    def never_ran(self) -> tuple[str, ...]:
        """Tests that no lane ran, that no sample left for another run, and that no lane that was
        not run could run."""
        return tuple(test for test in self._idle if not self._is_sampled(test) and not self.waits_for(test))

    @property
    def not_taken(self) -> int:
        """How many tests ran on no lane because of a sample."""
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
        """The lane with hardware or of a group, not run and of the same device as one that left the
        test out, that has all which that one lacks."""
        devices = {lane.name: lane.device for lane in self.declared}
        for name, cell in self.tests[test].items():
            for lane in self.declared:
                is_apart = lane.needs_hardware or lane.group
                is_twin = is_apart and lane.name not in self.lanes and lane.device == devices.get(name)
                if is_twin and cell.missing and cell.missing <= lane.capabilities:
                    return lane.name
        return ""

    def why_not(self, test: str) -> str:
        """Each lane's reason for not running a test."""
        return "; ".join(f"{lane}: {cell.reason}" for lane, cell in self.tests[test].items())


def read(records: Sequence[Path], root: Path = ROOT) -> Table:
    """The table of some lanes' records."""
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
    """A test's name without the package that it stands in: packages whose lanes share tests out
    name them alike."""
    return re.sub(r"^devices/[^/]+/", "devices/*/", test)


def shared(test: str) -> str:
    """The conformance kit is one suite, whichever package's file runs it: each of its laws is one
    row."""
    return _KIT.sub("devices/*/tests/test_conformance.py", test)


def gaps(root: Path) -> dict[str, tuple[str, ...]]:
    """The laws in each package's `gaps.toml`."""
    found = {}
    for path in sorted(root.glob("devices/*/*/gaps.toml")):
        found[path.parent.parent.name] = tuple(row["law"] for row in tomllib.loads(path.read_text()).get("gap", ()))
    return found


_MARKS = MappingProxyType(
    {"passed": "yes", "failed": "FAILED", "skipped": "skip", "left out": "-", "not taken": ".", "elsewhere": "."}
)


def markdown(table: Table) -> str:
    """One row a test; below, the reasons of skips, and the gaps."""
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
    """By folder and lane: how many tests ran."""
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
