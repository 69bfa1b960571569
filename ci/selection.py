"""Selects the tests of a lane that a run takes.

Without a turn: all. With a turn: all cheap tests; one part of the slow tests (the next turn takes
the next part) and the slow tests near to what has changed, or all slow tests; a closed group whole
if it is stale, otherwise one part of it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ci.groups import group_of, groups
from ci.lanes import ROOT, Lane, LaneError
from ci.sharing import Sharing

SLOW = Path("ci") / "slow.txt"
LATER = "slow, and another turn's"
PARTS = re.compile(r"# (\d+) turns")
"""The first line of the file: after how many turns each slow test has run once."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The slow tests: each runs in one of `turns` turns."""

    names: frozenset[str] = frozenset()
    """Their shared names (`shared_name`). A file's name stands for all its tests, which run in the
    same turn because they share costly fixtures."""
    turns: int = 10
    """Each slow test is taken once in this number of turns."""

    def name_of(self, test: str) -> str:
        """Return the entry of `names` that contains a test; empty for a cheap test."""
        name = shared_name(test)
        file = name.partition("::")[0]
        return file if file in self.names else name if name in self.names else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options that select tests."""

    turn: int | None = None
    """The number of the rotation, normally the number of commits; None: every test, on every lane
    that can run it."""
    turns: int = 1
    """How many parts of the slow tests this run takes: this turn's and the next ones'."""
    is_whole: bool = False
    """Take all slow tests. Groups still go by their digests, and lanes still share tests."""
    only: str = ""
    """Take only the tests of the group with this name."""
    fresh: frozenset[str] | None = None
    """Groups with unchanged files since they last passed; None: compare the digests."""
    near: Collection[str] = field(default=frozenset())
    """Slow tests to take because they run changed code."""


class Selection:
    """Selects from the tests that a lane can run."""

    def __init__(self, lane: Lane, wanted: Wanted | None = None, slow: Slow | None = None) -> None:
        self._wanted = wanted or Wanted()
        self.turn = self._wanted.turn
        self._groups = tuple(group for group in groups() if group.lane == lane.name)
        known, told = (() if self.turn is None else self._groups), self._wanted.fresh
        fresh = {group.name for group in known if (group.is_fresh() if told is None else group.name in told)}
        self.whole: tuple[str, ...] = tuple(group.name for group in self._groups if group.name not in fresh)
        """Names of the groups that are taken whole."""
        self.sampled: tuple[str, ...] = tuple(sorted(fresh))
        """Names of the groups that are taken in part."""
        self.takes_all = self.turn is None or self._wanted.is_whole
        """All slow tests are taken; none is left to another turn."""
        self._slow = slow_tests() if slow is None else slow
        self._sharing = None if self.turn is None else Sharing(lane, self.turn, self._slow.turns)

    def covered(self) -> dict[str, str]:
        """Compute the digests of the groups that are taken whole; reads all their files."""
        return {group.name: group.digest() for group in self._groups if group.name in self.whole}

    def left_out(self, items: Sequence[pytest.Item]) -> dict[str, str]:
        """Return the tests that are not taken, each with the reason."""
        shared: Mapping[str, str] = self._sharing.left_out(items) if self._sharing else {}
        near = self._wanted.near
        reasons = (
            (test, "" if test in near else self._reason(test) or shared.get(test, ""))
            for test in (item.nodeid for item in items)
        )
        return {test: reason for test, reason in reasons if reason}

    def _reason(self, test: str) -> str:
        group = group_of(test, self._groups)
        if self._wanted.only and (group is None or group.name != self._wanted.only):
            return f"not of the group {self._wanted.only}"
        if group is not None:
            is_part = group.share > 0 and self._is_turn(shared_name(test), 100 // group.share)
            is_taken = group.name in self.whole or is_part
            return "" if is_taken else f"another turn's of the group {group.name}"
        name = "" if self.takes_all else self._slow.name_of(test)
        return LATER if name and not self._is_turn(name, self._slow.turns) else ""

    def _is_turn(self, name: str, rounds: int) -> bool:
        """Return whether a name is in a part that is taken, when `rounds` parts rotate."""
        first = (self.turn or 0) * self._wanted.turns
        return (zlib.crc32(name.encode()) - first) % rounds < self._wanted.turns


def shared_name(test: str) -> str:
    """Return a test's name with `*` in place of its device package: packages give tests of the same
    kind the same name."""
    parts = test.split("/")
    return "/".join(["devices", "*", *parts[2:]]) if parts[0] == "devices" and len(parts) > 2 else test


def slow_tests(root: Path = ROOT) -> Slow:
    """Read `ci/slow.txt`; it lists only tests that a full run has timed. Raises LaneError."""
    file = root / SLOW
    if not file.is_file():
        return Slow()
    first, *names = file.read_text().splitlines() or [""]
    found = PARTS.fullmatch(first)
    if not found or not int(found[1]):
        raise LaneError(
            f"{SLOW} begins with {first!r}, not with '# 10 turns' or another number; `make test-all` writes it"
        )
    return Slow(frozenset(names), int(found[1]))
