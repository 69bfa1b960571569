"""What tests cost, from the records of lanes, and which of them are slow: `ci/slow.txt`, which a run of everything writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.groups import group_of, groups
from ci.impact import Timed
from ci.lanes import ROOT
from ci.selection import SLOW, shared_name, slow_tests

LIMIT = 0.5
"""Seconds that a test may cost and be run always."""
MARGIN = 0.2
"""A test changes sides only if it is so much, as a part of the limit, beyond it: costs vary from run to run."""


def timed(records: Sequence[Path], slow: frozenset[str]) -> list[Timed]:
    """Every test that ran, by the records of the lanes."""
    found = []
    for path in records:
        record = json.loads(path.read_text())
        for test, seconds in costs(record).items():
            found.append(Timed(record["lane"], test, seconds, shared_name(test) in slow))
    return found


def costs(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each test of a lane that ran: its processor's seconds, or half of those by the clock where that is more,
    because others may use the machine; and its part of what the fixtures of its file took."""
    ran = {test: known for test, known in record["tests"].items() if known["outcome"] != "skipped"}
    counts = Counter(test.partition("::")[0] for test in ran)
    fixtures = record.get("fixtures", {})
    return {
        test: round(_own(known) + fixtures.get(file, 0.0) / 2 / counts[file], 3)
        for test, known in ran.items()
        for file in (test.partition("::")[0],)
    }


def _own(known: Mapping[str, Any]) -> float:
    return max(known.get("processor", 0.0), known["seconds"] / 2)


def slow_of(records: Sequence[Path], before: frozenset[str]) -> frozenset[str]:
    """The shared names of tests that cost more than the limit on some lane. Those of closed groups are not among them:
    their group says when they run. What did not run keeps its place."""
    worst: dict[str, float] = {}
    grouped: set[str] = set()
    known = groups()
    for path in records:
        record = json.loads(path.read_text())
        own = [group for group in known if group.lane == record["lane"]]
        for test, seconds in costs(record).items():
            name = shared_name(test)
            worst[name] = max(worst.get(name, 0.0), seconds)
            if group_of(test, own):
                grouped.add(name)
    slow = {name for name, seconds in worst.items() if seconds > _limit(name in before) and name not in grouped}
    return frozenset(slow | (before - worst.keys() - grouped))


def _limit(is_slow: bool) -> float:
    return LIMIT * (1 - MARGIN if is_slow else 1 + MARGIN)


def write_slow(names: Iterable[str], root: Path = ROOT) -> tuple[int, int]:
    """Write `ci/slow.txt`; returns how many names are new, and how many went."""
    before, now = slow_tests(root), frozenset(names)
    (root / SLOW).write_text("".join(f"{name}\n" for name in sorted(now)))
    return len(now - before), len(before - now)
