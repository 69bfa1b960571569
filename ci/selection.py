"""Which of a lane's tests a run takes: all, or a sample of exhaustive groups and of laws on simulated devices by pairs."""

from __future__ import annotations

import random
import re
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from ci.groups import Group, group_of, groups
from ci.lanes import ROOT, Lane, lanes

PAIRS = Path("tests") / "pairs.toml"
ELSEWHERE = "another lane takes it"


@dataclass(frozen=True, slots=True)
class Pairs:
    """One row of `tests/pairs.toml`: files whose tests, or those that `only` finds in their names, some lanes share out.

    With `rotates`, a parameter, every lane takes every test with one value of it, the next lane with the next one;
    without, each test runs on one of the lanes.
    """

    tests: str
    reason: str
    rotates: str = ""
    only: str = ""
    lanes: tuple[str, ...] = ()

    def has(self, test: str) -> bool:
        """Whether a test, by pytest's name, is shared out by this row."""
        file, _, name = test.partition("::")
        return fnmatchcase(file, self.tests) and re.search(self.only, name) is not None


class Selection:
    """What a run takes of the tests that its lane can run. `seed` draws the samples; None: everything is taken. `only`: of the
    group of this name alone. `fresh`: the groups that cover what they did, where somebody has looked."""

    def __init__(
        self, lane: Lane, seed: int | None = None, only: str = "", fresh: frozenset[str] | None = None
    ) -> None:
        self.seed = seed
        self._only = only
        self._groups = tuple(group for group in groups() if group.lane == lane.name)
        known = () if seed is None else self._groups
        sampled = {group.name for group in known if (group.is_fresh() if fresh is None else group.name in fresh)}
        self.whole: tuple[str, ...] = tuple(group.name for group in self._groups if group.name not in sampled)
        """The groups that are taken whole."""
        self.sampled: tuple[str, ...] = tuple(sorted(sampled))
        """The groups of which a sample is taken."""
        takes_pairs = seed is not None or only
        self._pairs = tuple(row for row in pairs() if lane.name in row.lanes) if takes_pairs else ()
        self._lane = lane.name

    def covered(self) -> dict[str, str]:
        """The digests of what the groups that are taken whole cover now; reads all their files."""
        return {group.name: group.digest() for group in self._groups if group.name in self.whole}

    def left_out(self, items: Sequence[pytest.Item]) -> dict[str, str]:
        """The tests that are not taken, each with the reason."""
        found = {row: Places([item for item in items if row.has(item.nodeid)]) for row in self._pairs}
        reasons = ((item.nodeid, self._reason(item, found)) for item in items)
        return {test: reason for test, reason in reasons if reason}

    def _reason(self, item: pytest.Item, found: Mapping[Pairs, Places]) -> str:
        group = group_of(item.nodeid, self._groups)
        if self._only and (group is None or group.name != self._only):
            return f"not of the group {self._only}"
        if group and not self._is_drawn(group, item.nodeid):
            return f"not in the sample of the group {group.name}"
        row = next((row for row in self._pairs if row.has(item.nodeid)), None)
        return "" if row is None else self._not_paired(row, item, found[row])

    def _is_drawn(self, group: Group, test: str) -> bool:
        if group.name in self.whole:
            return True
        return random.Random(f"{self.seed} {group.name} {test}").random() * 100 < group.share

    def _not_paired(self, row: Pairs, item: pytest.Item, found: Places) -> str:
        turn = row.lanes.index(self._lane)
        if row.rotates not in _values(item):
            is_own = zlib.crc32(item.nodeid.partition("::")[2].encode()) % len(row.lanes) == turn
            return "" if is_own else ELSEWHERE
        return "" if found.is_turn(item, row.rotates, turn) else f"another {row.rotates} is taken"


class Places:
    """Tests of a row in their order, and the place of each value among those of its parameter."""

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        self._values: dict[str, list[Any]] = {}
        self._laws: list[str] = []
        for item in items:
            if _law(item) not in self._laws:
                self._laws.append(_law(item))
            for name, value in _values(item).items():
                values = self._values.setdefault(name, [])
                if value not in values:
                    values.append(value)

    def is_turn(self, item: pytest.Item, rotates: str, turn: int) -> bool:
        """Whether a test is taken: each law, each value of the other parameters and each lane takes the next value of the
        parameter that rotates."""
        values = _values(item)
        others = sum(self._values[name].index(value) for name, value in values.items() if name != rotates)
        known = self._values[rotates]
        return known.index(values[rotates]) == (turn + self._laws.index(_law(item)) + others) % len(known)


def pairs(root: Path = ROOT) -> tuple[Pairs, ...]:
    """The table of what lanes share out: those with a simulated device, where a row lists none."""
    simulated = tuple(lane.name for lane in lanes(root) if lane.simulator)
    rows = tomllib.loads((root / PAIRS).read_text())["pairs"]
    return tuple(Pairs(**{**row, "lanes": tuple(row.get("lanes", simulated))}) for row in rows)


def _values(item: pytest.Item) -> Mapping[str, Any]:
    made: Any = getattr(item, "callspec", None)  # foreign: pytest gives it to tests with parameters only
    return made.params if made else {}


def _law(item: pytest.Item) -> str:
    """A test's name without its parameters."""
    return item.nodeid.partition("[")[0]
