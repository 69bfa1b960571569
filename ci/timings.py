"""What tests cost, from the records of lanes, and which of them are slow: `ci/slow.txt`, which a
run of everything writes.

A suite that grows must not make `make test` longer. So what is fixed is not what a cheap test may
cost, nor how many turns take all slow tests, but how long the cheap tests may take together, and
how long a turn may.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.groups import group_of, groups
from ci.impact import Timed
from ci.lanes import ROOT
from ci.selection import SLOW, Slow, shared_name, slow_tests

ALWAYS = 200.0
"""Seconds of the cheapest tests, on all lanes together, that are run always."""
TURN = 120.0
"""Seconds of the other tests that a turn takes."""
LIMIT = 0.5
"""Seconds that a test may cost and be run always, wherever it stands."""
PART = 0.75
"""Of the seconds by the clock."""
SHARED = 2.0
"""Seconds of a file's fixtures on a lane beyond which its tests go together, so that they are paid
for in one turn, ..."""
PER_TEST = 0.1
"""... unless there are so many tests in it that the part of each is less than so many seconds."""
MARGIN = 0.2
"""A test changes sides only if it is so much, as a part of its cost, beyond the limit: costs vary
from run to run."""


def timed(records: Sequence[Path], slow: Slow) -> list[Timed]:
    """Every test that ran, by the records of the lanes."""
    found = []
    for path in records:
        record = json.loads(path.read_text())
        for test, seconds in costs(record).items():
            found.append(Timed(record["lane"], test, seconds, bool(slow.name_of(test))))
    return found


def costs(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each test of a lane that ran: its processor's seconds, or three quarters of those
    by the clock where that is more, because others may use the machine; and its part of what the
    fixtures of its file took."""
    ran = {test: known for test, known in record["tests"].items() if known["outcome"] != "skipped"}
    counts = Counter(test.partition("::")[0] for test in ran)
    fixtures = record.get("fixtures", {})
    return {
        test: round(_own(known) + PART * fixtures.get(file, 0.0) / counts[file], 3)
        for test, known in ran.items()
        for file in (test.partition("::")[0],)
    }


def _own(known: Mapping[str, Any]) -> float:
    return max(known.get("processor", 0.0), PART * known["seconds"])


def slow_of(records: Sequence[Path], before: Slow) -> Slow:
    """The slow tests: all but the cheapest that fit into the time for cheap ones. What a test costs
    is the most that it does on a lane, and it takes the time of all lanes that ran it. Those of
    closed groups are not among them: their group says when they run. Tests of a file with costly
    fixtures go by the file's name. What did not run keeps its place."""
    worst: dict[str, float] = {}
    together: dict[str, float] = defaultdict(float)
    ran: set[str] = set()
    known = groups()
    for path in records:
        record = json.loads(path.read_text())
        own = [group for group in known if group.lane == record["lane"]]
        found = costs(record)
        shared = {shared_name(file) for file in _costly(record.get("fixtures", {}), found)}
        for test, seconds in found.items():
            name = shared_name(test)
            file = name.partition("::")[0]
            ran |= {name, file}
            if not group_of(test, own):
                name, alone = (file, math.inf) if file in shared else (name, seconds)
                worst[name] = max(worst.get(name, 0.0), alone)
                together[name] += seconds
    ranked = {name: cost * _weight(name in before.names) for name, cost in worst.items()}
    names = _beyond(ranked, together) | (before.names - ran)
    return Slow(names, max(1, math.ceil(sum(together[name] for name in names) / TURN)))


def _costly(fixtures: Mapping[str, float], tests: Iterable[str]) -> list[str]:
    """The files whose fixtures make their tests slow."""
    counts = Counter(test.partition("::")[0] for test in tests)
    return [
        file
        for file, seconds in fixtures.items()
        if seconds > SHARED and seconds > PER_TEST * counts[file] and counts[file]
    ]


def _weight(is_slow: bool) -> float:
    return 1 + MARGIN if is_slow else 1 - MARGIN


def _beyond(ranked: Mapping[str, float], together: Mapping[str, float]) -> frozenset[str]:
    """The tests behind those that fit, the cheapest first."""
    left = ALWAYS
    for place, name in enumerate(order := sorted(ranked, key=lambda name: (ranked[name], name))):
        left -= together[name]
        if left < 0 or ranked[name] > LIMIT:
            return frozenset(order[place:])
    return frozenset()


def write_slow(slow: Slow, root: Path = ROOT) -> tuple[int, int]:
    """Write `ci/slow.txt`; returns how many names are new, and how many went."""
    before = slow_tests(root).names
    text = "".join(f"{line}\n" for line in (f"# {slow.turns} turns", *sorted(slow.names)))
    (root / SLOW).write_text(text)
    return len(slow.names - before), len(before - slow.names)
