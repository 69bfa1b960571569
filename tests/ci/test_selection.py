"""A sample is the same for its seed in every process, and lanes that share tests out leave no pair of values untried."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ci import selection as module
from ci.groups import Group
from ci.lanes import ROOT, Lane, lanes
from ci.selection import ELSEWHERE, Pairs, Places, Selection, pairs

LANES = ("a", "b", "c", "d")
GROUP = Group(name="many", lane="a", tests=("t.py::*",), sources=(), share=20)
LAW = Pairs("laws.py", "r", rotates="case", lanes=LANES)


def item(test: str, **params: Any) -> Any:
    """What the selection reads of a test."""
    values = "-".join(map(str, params.values()))
    made = SimpleNamespace(nodeid=f"{test}[{values}]" if params else test)
    if params:
        made.callspec = SimpleNamespace(params=params)
    return made


def selection(
    monkeypatch: pytest.MonkeyPatch, lane: str, seed: int | None, only: str = "", fresh: bool = True
) -> Selection:
    monkeypatch.setattr(module, "groups", lambda: (GROUP,))
    monkeypatch.setattr(Group, "is_fresh", lambda self: fresh)
    monkeypatch.setattr(module, "pairs", lambda: (LAW, Pairs("devices/*/x.py", "r", only="shared", lanes=LANES)))
    return Selection(Lane(name=lane, device="x", capabilities=frozenset()), seed, only)


def grid() -> list[Any]:
    """Laws of one file, over graphs, seeds and cases."""
    laws = [(f"laws.py::test_{law}", {"graph": g}) for law in range(6) for g in "xyz"]
    laws += [("laws.py::test_seeded", {"graph": g, "seed": seed}) for g in "xyz" for seed in (1, 2)]
    return [item(law, case=case, **others) for case in "ABCDE" for law, others in laws]


def taken(chosen: Selection, items: list[Any]) -> list[Any]:
    left = chosen.left_out(items)
    return [one for one in items if one.nodeid not in left]


def test_every_pair_is_met_and_every_lane_takes_every_law_with_every_other_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items, met = grid(), set()
    for lane in LANES:
        own = taken(selection(monkeypatch, lane, 1), items)
        params = [{"law": one.nodeid.partition("[")[0], **one.callspec.params} for one in own]
        assert len(own) * 5 == len(items)
        assert len({tuple(v for k, v in p.items() if k != "case") for p in params}) == len(own)
        for values in params:
            met |= set(itertools.combinations(sorted({**values, "lane": lane}.items()), 2))
    wanted = [
        {"law": one.nodeid.partition("[")[0], **one.callspec.params, "lane": lane} for one in items for lane in LANES
    ]
    for values in wanted:
        assert set(itertools.combinations(sorted(values.items()), 2)) <= met


def test_the_order_of_values_is_that_of_the_tests() -> None:
    places = Places(grid())
    first = item("laws.py::test_0", case="A", graph="x")
    assert places.is_turn(first, "case", 0) and not places.is_turn(first, "case", 1)
    assert places.is_turn(item("laws.py::test_0", case="B", graph="y"), "case", 0)


def test_what_is_shared_out_runs_on_exactly_one_lane_and_the_rest_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"shared_{number}" for number in range(40)]
    runs: list[str] = []
    for lane in LANES:
        items = [item(f"devices/{lane}/x.py::test[{name}]") for name in (*names, "own")]
        chosen = selection(monkeypatch, lane, 1)
        assert set(chosen.left_out(items).values()) == {ELSEWHERE}
        runs += [one.nodeid.partition("::")[2] for one in taken(chosen, items)]
    assert sorted(runs) == sorted([*(f"test[{name}]" for name in names), *["test[own]"] * len(LANES)])


def test_a_sample_is_of_its_seed_and_about_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item(f"t.py::test_{number}") for number in range(500)]
    first, again, other = (selection(monkeypatch, "a", seed).left_out(items) for seed in (1, 1, 2))
    assert first == again != other
    assert 350 < len(first) < 450


@pytest.mark.parametrize(("seed", "fresh"), [(None, True), (1, False)])
def test_a_group_is_whole_without_a_seed_and_where_it_is_stale(
    monkeypatch: pytest.MonkeyPatch, seed: int | None, fresh: bool
) -> None:
    chosen = selection(monkeypatch, "a", seed, fresh=fresh)
    assert chosen.left_out([item(f"t.py::test_{number}") for number in range(50)]) == {}
    assert chosen.whole == ("many",) and chosen.sampled == ()
    assert chosen.covered() == {"many": GROUP.digest()}


def test_without_a_seed_everything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selection(monkeypatch, "a", None).left_out(grid()) == {}


def test_a_group_alone_is_all_of_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item("t.py::test_x"), item("u.py::test_x")]
    assert [one.nodeid for one in taken(selection(monkeypatch, "a", None, "many"), items)] == ["t.py::test_x"]


def test_a_group_alone_is_shared_out_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "groups", lambda: (replace(GROUP, tests=("laws.py::*",)),))
    monkeypatch.setattr(module, "pairs", lambda: (LAW,))
    chosen = Selection(Lane(name="a", device="x", capabilities=frozenset()), None, "many")
    assert len(taken(chosen, grid())) * 5 == len(grid())


def test_who_has_looked_which_groups_are_fresh_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "groups", lambda: (GROUP,))
    monkeypatch.setattr(Group, "is_fresh", lambda self: pytest.fail("looked up again"))
    lane = Lane(name="a", device="x", capabilities=frozenset())
    assert Selection(lane, 1, fresh=frozenset({"many"})).sampled == ("many",)
    assert Selection(lane, 1, fresh=frozenset({"other"})).whole == ("many",)


def test_the_table_of_the_project_names_files_and_lanes_that_are_there() -> None:
    known = {lane.name for lane in lanes() if lane.simulator}
    for row in pairs():
        assert any(ROOT.glob(row.tests)) and set(row.lanes) <= known and row.reason, row.tests
