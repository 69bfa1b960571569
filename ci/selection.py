"""Which of a lane's tests a run takes.

Without a turn, all. With one: every cheap test; of the slow ones a part, the next part at the next
turn, and those near to what has changed, or all of them; a closed group whole where it is stale,
and else a part of it by turns.
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
"""The first line of the file: how many turns take all slow tests."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The tests that are not run at every turn."""

    names: frozenset[str] = frozenset()
    """Their shared names (`shared_name`), and files whose tests all go together because they share
    what costs most."""
    turns: int = 10
    """In so many turns each of them is taken once."""

    def name_of(self, test: str) -> str:
        """The one of `names` by which a test goes; empty for a cheap test."""
        name = shared_name(test)
        file = name.partition("::")[0]
        return file if file in self.names else name if name in self.names else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a run is asked to take."""

    turn: int | None = None
    """The rotation's number, as a rule the number of commits; None: everything, on every lane that
    can run it."""
    turns: int = 1
    """The parts that are taken at once: this turn's and the next ones'."""
    is_whole: bool = False
    """All slow tests are taken; groups go by their digests, and lanes share tests out."""
    only: str = ""
    """The tests of the group of this name alone."""
    fresh: frozenset[str] | None = None
    """The groups that cover what they did when they last passed; None: this is looked up."""
    near: Collection[str] = field(default=frozenset())
    """Slow tests that are taken because they run what has changed."""


class Selection:
    """What a run takes of the tests that its lane can run."""

    def __init__(self, lane: Lane, wanted: Wanted | None = None, slow: Slow | None = None) -> None:
        self._wanted = wanted or Wanted()
        self.turn = self._wanted.turn
        self._groups = tuple(group for group in groups() if group.lane == lane.name)
        known, told = (() if self.turn is None else self._groups), self._wanted.fresh
        fresh = {group.name for group in known if (group.is_fresh() if told is None else group.name in told)}
        self.whole: tuple[str, ...] = tuple(group.name for group in self._groups if group.name not in fresh)
        """The groups that are taken whole."""
        self.sampled: tuple[str, ...] = tuple(sorted(fresh))
        """The groups of which a part is taken."""
        self.takes_all = self.turn is None or self._wanted.is_whole
        """No slow test is left to another turn."""
        self._slow = slow_tests() if slow is None else slow
        self._sharing = None if self.turn is None else Sharing(lane, self.turn, self._slow.turns)

    def covered(self) -> dict[str, str]:
        """The digests of what the groups that are taken whole cover now; reads all their files."""
        return {group.name: group.digest() for group in self._groups if group.name in self.whole}

    def left_out(self, items: Sequence[pytest.Item]) -> dict[str, str]:
        """The tests that are not taken, each with the reason."""
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
        """Of so many parts, whether a name is in one that is taken."""
        first = (self.turn or 0) * self._wanted.turns
        return (zlib.crc32(name.encode()) - first) % rounds < self._wanted.turns


def shared_name(test: str) -> str:
    """A test's name without the package in whose folder it stands: packages name tests of one kind
    alike."""
    parts = test.split("/")
    return "/".join(["devices", "*", *parts[2:]]) if parts[0] == "devices" and len(parts) > 2 else test


def slow_tests(root: Path = ROOT) -> Slow:
    """The tests of `ci/slow.txt`; a test that no run of everything has timed is not among them.
    Raises LaneError."""
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
