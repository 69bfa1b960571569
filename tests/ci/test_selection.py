"""A run takes all cheap tests, a rotating part of the slow ones, all tests near the change, and
groups by their digests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci import selection as module
from ci.groups import Group
from ci.lanes import Lane, LaneError
from ci.selection import SLOW as FILE
from ci.selection import Selection, Slow, Wanted, shared_name, slow_tests

GROUP = Group(name="many", lane="a", tests=("t.py::*",), sources=(), share=20)
LANE = Lane(name="a", device="x", capabilities=frozenset())
ROUNDS = 12
SLOW = tuple(f"s.py::test_{number}" for number in range(300))


@pytest.fixture(autouse=True)
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """One closed group on the lane, fresh for its sources."""
    monkeypatch.setattr(module, "groups", lambda: (GROUP,))
    monkeypatch.setattr(Group, "is_fresh", lambda self: True)


def item(test: str) -> Any:
    """The attributes of a test that the selection reads."""
    return SimpleNamespace(nodeid=test)


def taken(tests: tuple[str, ...], **wanted: Any) -> list[str]:
    left = Selection(LANE, Wanted(**wanted), slow=Slow(frozenset(SLOW), ROUNDS)).left_out(
        [item(test) for test in tests]
    )
    return [test for test in tests if test not in left]


def test_a_cheap_test_is_taken_at_every_turn() -> None:
    assert all(taken(("c.py::test_x",), turn=turn) for turn in range(2 * ROUNDS))


def test_each_slow_test_is_taken_once_in_all_turns_and_each_turn_takes_about_the_same_part() -> None:
    turns = [taken(SLOW, turn=turn) for turn in range(ROUNDS)]
    assert sorted(test for tests in turns for test in tests) == sorted(SLOW)
    assert all(10 < len(tests) < 50 for tests in turns)
    assert taken(SLOW, turn=3) == taken(SLOW, turn=3 + ROUNDS)


def test_several_parts_at_once_are_those_of_as_many_turns() -> None:
    parts = [taken(SLOW, turn=turn) for turn in range(ROUNDS)]
    for turn in range(ROUNDS // 3):
        together = sorted(test for part in parts[3 * turn : 3 * turn + 3] for test in part)
        assert sorted(taken(SLOW, turn=turn, turns=3)) == together
    assert taken(SLOW, turn=7, turns=ROUNDS + 1) == list(SLOW)
    assert taken(("t.py::test_1",), turn=2, turns=5) == ["t.py::test_1"], "five parts of a group are all of it"


def test_the_stored_file_says_in_how_many_turns_and_one_that_does_not_is_refused(tmp_path: Path) -> None:
    assert slow_tests(tmp_path) == Slow()
    (tmp_path / FILE).parent.mkdir()
    (tmp_path / FILE).write_text("# 40 turns\na.py::test_x\n")
    assert slow_tests(tmp_path) == Slow(frozenset({"a.py::test_x"}), 40)
    for wrong in ("", "a.py::test_x\n", "# 0 turns\n", "# many turns\n"):
        (tmp_path / FILE).write_text(wrong)
        with pytest.raises(LaneError, match="make test-all"):
            slow_tests(tmp_path)


def test_slow_tests_of_packages_are_known_by_the_name_that_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_name("devices/one/tests/test_x.py::test_y[a/b]") == "devices/*/tests/test_x.py::test_y[a/b]"
    assert shared_name("tests/laws/test_x.py::test_y") == "tests/laws/test_x.py::test_y"
    names = frozenset({"devices/*/t.py::test_y"})
    left = [
        Selection(LANE, Wanted(turn=turn), slow=Slow(names, ROUNDS)).left_out([item("devices/one/t.py::test_y")])
        for turn in range(ROUNDS)
    ]
    assert [bool(each) for each in left].count(False) == 1


def test_tests_of_a_listed_file_go_together() -> None:
    slow = Slow(frozenset({"s.py"}), ROUNDS)
    tests = [item(test) for test in SLOW]
    left = [Selection(LANE, Wanted(turn=turn), slow=slow).left_out(tests) for turn in range(ROUNDS)]
    assert sorted(map(len, left)) == [0, *[len(SLOW)] * (ROUNDS - 1)]


def test_what_is_near_is_taken_whatever_the_turn() -> None:
    assert taken(SLOW[:50], turn=1, near=SLOW[:50]) == list(SLOW[:50])
    assert taken(("t.py::test_1",), turn=1, near=("t.py::test_1",)) == ["t.py::test_1"]


@pytest.mark.parametrize("wanted", [{}, {"turn": 4, "is_whole": True}])
def test_everything_is_taken_by_hand_and_by_a_whole_run(wanted: dict[str, Any]) -> None:
    assert taken(SLOW, **wanted) == list(SLOW)


def test_a_group_is_taken_in_parts_by_turns_while_it_is_fresh() -> None:
    tests = tuple(f"t.py::test_{number}" for number in range(100))
    turns = [taken(tests, turn=turn) for turn in range(5)]
    assert sorted(test for each in turns for test in each) == sorted(tests)
    assert all(10 < len(each) < 35 for each in turns)
    assert taken(tests, turn=3, is_whole=True) == turns[3], "a run of all slow tests goes by digests too"


@pytest.mark.parametrize(
    ("wanted", "fresh"), [({}, True), ({"turn": 1}, False), ({"turn": 1, "is_whole": True}, False)]
)
def test_a_group_is_whole_by_hand_and_where_it_is_stale(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], fresh: bool
) -> None:
    monkeypatch.setattr(Group, "is_fresh", lambda self: fresh)
    chosen = Selection(LANE, Wanted(**wanted), slow=Slow())
    assert chosen.left_out([item(f"t.py::test_{number}") for number in range(50)]) == {}
    assert chosen.whole == ("many",) and chosen.sampled == ()
    assert chosen.covered() == {"many": GROUP.digest()}


def test_a_group_alone_is_all_of_it_and_nothing_else() -> None:
    assert taken(("t.py::test_x", "u.py::test_x"), only="many") == ["t.py::test_x"]


def test_a_lane_that_is_told_which_groups_are_fresh_looks_up_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "is_fresh", lambda self: pytest.fail("looked up again"))
    assert Selection(LANE, Wanted(turn=1, fresh=frozenset({"many"}))).sampled == ("many",)
    assert Selection(LANE, Wanted(turn=1, fresh=frozenset({"other"}))).whole == ("many",)


def test_nothing_is_taken_of_a_fresh_group_without_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "groups", lambda: (replace(GROUP, share=0),))
    tests = tuple(f"t.py::test_{number}" for number in range(20))
    assert [taken(tests, turn=turn) for turn in range(100)] == [[]] * 100
    monkeypatch.setattr(Group, "is_fresh", lambda self: False)
    assert taken(tests, turn=0) == list(tests)
