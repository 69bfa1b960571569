"""Computes test costs from the records of lanes, and which tests are slow: `ci/slow.txt`, which a
full run writes.

A growing suite must not make `make test` longer. Therefore the total time of the cheap tests and
the time of a turn are fixed; the cost limit of a cheap test and the number of turns follow.
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
"""Seconds of the tests that always run, on all lanes together: the cheapest ones."""
TURN = 120.0
"""Seconds of slow tests in one turn."""
LIMIT = 0.5
"""A test that costs more seconds is slow even if it would fit into ALWAYS."""
PART = 0.75
"""The fraction of wall-clock seconds that counts."""
SHARED = 2.0
"""A file with more seconds of fixtures on a lane is slow as a whole, so that the fixtures run in
one turn only, ..."""
PER_TEST = 0.1
"""... unless the fixtures' seconds divided by the number of its tests are at most this."""
MARGIN = 0.2
"""Hysteresis: a test changes between cheap and slow only if its cost is beyond the limit by this
fraction, because costs vary between runs."""


def timed(records: Sequence[Path], slow: Slow) -> list[Timed]:
    """Return every test that ran with its cost, from the records of lanes."""
    found = []
    for path in records:
        record = json.loads(path.read_text())
        for test, seconds in costs(record).items():
            found.append(Timed(record["lane"], test, seconds, bool(slow.name_of(test))))
    return found


def costs(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the cost in seconds of each test that ran on a lane: its CPU seconds, or PART of its
    wall-clock seconds if that is more (other processes may use the machine), plus its share of PART
    of its file's fixture seconds."""
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
    """Compute the slow tests: all except the cheapest that fit into ALWAYS and cost at most LIMIT.

    Tests are ranked by their highest cost on a lane; their costs on all lanes count against ALWAYS.
    Tests of closed groups are not included: their group decides when they run. A file with costly
    fixtures is one entry. A slow test that did not run stays slow."""
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
    """Return the files with fixtures that make their tests slow (SHARED, PER_TEST)."""
    counts = Counter(test.partition("::")[0] for test in tests)
    return [
        file
        for file, seconds in fixtures.items()
        if seconds > SHARED and seconds > PER_TEST * counts[file] and counts[file]
    ]


def _weight(is_slow: bool) -> float:
    return 1 + MARGIN if is_slow else 1 - MARGIN


def _beyond(ranked: Mapping[str, float], together: Mapping[str, float]) -> frozenset[str]:
    """Take tests, cheapest first, while they fit into ALWAYS and LIMIT; return the rest."""
    left = ALWAYS
    for place, name in enumerate(order := sorted(ranked, key=lambda name: (ranked[name], name))):
        left -= together[name]
        if left < 0 or ranked[name] > LIMIT:
            return frozenset(order[place:])
    return frozenset()


def write_slow(slow: Slow, root: Path = ROOT) -> tuple[int, int]:
    """Write `ci/slow.txt`; returns the numbers of added and of removed names."""
    before = slow_tests(root).names
    text = "".join(f"{line}\n" for line in (f"# {slow.turns} turns", *sorted(slow.names)))
    (root / SLOW).write_text(text)
    return len(slow.names - before), len(before - slow.names)
