"""Decides which simulated lane takes a test that several of them can run.

The rule: a test of `tests/` runs on one of these lanes, and on the next lane at the next commit.
Tests of a device package and of the simulator run on each of their lanes. `tests/sharing.toml` has
the exceptions, each with its reason.
"""

from __future__ import annotations

import re
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from ci.lanes import ROOT, Lane, LaneError, lanes, needs_of

EXCEPTIONS = Path("tests") / "sharing.toml"
ELSEWHERE = "another lane takes it"
EVERY, ONE = "every", "one"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRow:
    """One row of `tests/sharing.toml`."""

    tests: str
    """A pattern of files."""
    reason: str
    """Why the rule does not apply to them."""
    runs_on: str = ""
    """"every": each lane takes the tests; "one": one lane does, although they are in a package's
    folder."""
    rotates: str = ""
    """A parameter: each lane takes every test with one value of it, the next lane with the next
    value."""
    only: str = ""
    """A regular expression for the names of the tests; the row applies to matching ones."""
    lanes: tuple[str, ...] = ()
    """The lanes that share the tests (empty: all simulated lanes that can run the test)."""

    def has(self, test: str) -> bool:
        """Return whether this row applies to a test, by its pytest node id."""
        file, _, name = test.partition("::")
        return fnmatchcase(file, self.tests) and re.search(self.only, name) is not None


class Sharing:
    """Selects, for one lane, from the tests that several simulated lanes can run. Each `turn` moves
    every test to the next lane. A slow test runs in one of `turns` turns; the next time it runs on
    the next lane."""

    def __init__(self, lane: Lane, turn: int, turns: int, root: Path = ROOT) -> None:
        self._lane = lane.name
        self._turn = turn + turn // turns
        self._simulated = tuple(each for each in lanes(root) if each.simulator)
        self._rows = exceptions(root) if any(each.name == lane.name for each in self._simulated) else None

    def left_out(self, items: Sequence[pytest.Item]) -> dict[str, str]:
        """Return the tests that this lane does not take, each with the reason: another lane takes
        them, or another value of the rotating parameter is due."""
        if self._rows is None:
            return {}
        rows = {item.nodeid: self._row(item.nodeid) for item in items}
        rotating = {
            row: Places([item for item in items if rows[item.nodeid] is row])
            for row in set(rows.values())
            if row is not None and row.rotates
        }
        reasons = ((item.nodeid, self._reason(item, rows[item.nodeid], rotating)) for item in items)
        return {test: reason for test, reason in reasons if reason}

    def _row(self, test: str) -> SharingRow | None:
        return next((row for row in self._rows or () if row.has(test)), None)

    def _reason(self, item: pytest.Item, row: SharingRow | None, rotating: Mapping[SharingRow, Places]) -> str:
        if row is None:
            return self._elsewhere(item, ()) if item.nodeid.startswith("tests/") else ""
        if row.runs_on == EVERY or (row.lanes and self._lane not in row.lanes):
            return ""
        if row.rotates and row.rotates in values_of(item):
            place = [lane.name for lane in self._simulated].index(self._lane) + self._turn
            return "" if rotating[row].is_turn(item, row.rotates, place) else f"another {row.rotates} is taken"
        return self._elsewhere(item, row.lanes)

    def _elsewhere(self, item: pytest.Item, names: tuple[str, ...]) -> str:
        able = names or self._able(item)
        name = item.nodeid.partition("::")[2] if item.nodeid.startswith("devices/") else item.nodeid
        taker = able[(zlib.crc32(name.encode()) + self._turn) % len(able)] if able else self._lane
        return "" if taker == self._lane else ELSEWHERE

    def _able(self, item: pytest.Item) -> tuple[str, ...]:
        """Return the names of the simulated lanes that can run a test."""
        marks = frozenset(str(name) for mark in item.iter_markers("needs") for name in mark.args)
        needs = needs_of(item.path.relative_to(ROOT), marks)
        return tuple(lane.name for lane in self._simulated if not lane.missing(needs))


class Places:
    """The tests of a row in order, and the index of each parameter's values."""

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        self._values: dict[str, list[Any]] = {}
        self._laws: list[str] = []
        for item in items:
            if law_of(item) not in self._laws:
                self._laws.append(law_of(item))
            for name, value in values_of(item).items():
                values = self._values.setdefault(name, [])
                if value not in values:
                    values.append(value)

    def is_turn(self, item: pytest.Item, rotates: str, turn: int) -> bool:
        """Return whether a test is taken: the rotating parameter's value moves by one with each
        lane and turn, each test function, and each value of the other parameters."""
        values = values_of(item)
        others = sum(self._values[name].index(value) for name, value in values.items() if name != rotates)
        known = self._values[rotates]
        return known.index(values[rotates]) == (turn + self._laws.index(law_of(item)) + others) % len(known)


def exceptions(root: Path = ROOT) -> tuple[SharingRow, ...]:
    """Read the rows of `tests/sharing.toml`; the first row that matches a test applies. Raises
    LaneError."""
    file = root / EXCEPTIONS
    rows = tomllib.loads(file.read_text()).get("exception", ()) if file.is_file() else ()
    return tuple(_row(row) for row in rows)


def _row(row: dict[str, Any]) -> SharingRow:
    known = set(SharingRow.__dataclass_fields__)
    wrong = sorted(row.keys() - known) + sorted({"tests", "reason"} - row.keys())
    if wrong or (row.get("runs_on", "") in (EVERY, ONE)) == bool(row.get("rotates")):
        what = f"unknown or missing: {', '.join(wrong)}" if wrong else f"{row['tests']} has both or neither"
        raise LaneError(f'{EXCEPTIONS}: {what}; a row has tests, reason, and runs_on = "every" | "one" or rotates')
    return SharingRow(**{**row, "lanes": tuple(row.get("lanes", ()))})


def values_of(item: pytest.Item) -> Mapping[str, Any]:
    """Return a test's parameters and their values."""
    made: Any = getattr(item, "callspec", None)  # foreign: pytest gives it to tests with parameters only
    return made.params if made else {}


def law_of(item: pytest.Item) -> str:
    """Return a test's name without its parameters."""
    return item.nodeid.partition("[")[0]
