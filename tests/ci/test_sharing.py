"""Simulated lanes share tests, so that a run has each test on one of them, and over several runs on
each lane that can run it."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci.lanes import ROOT, LaneError, lanes
from ci.sharing import ELSEWHERE, EXCEPTIONS, Places, Sharing, SharingRow, exceptions

ROUNDS = 10
NAMES = ("a-sim", "b-sim", "c-sim", "d-sim")
ROWS = """
[[exception]]
tests = "tests/every.py"
runs_on = "every"
reason = "r"

[[exception]]
tests = "devices/*/x.py"
runs_on = "one"
only = "shared"
lanes = ["a-sim", "b-sim", "c-sim", "d-sim"]
reason = "r"

[[exception]]
tests = "tests/laws.py"
rotates = "case"
reason = "r"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with four simulated lanes, where the last lacks the capability `wings`, and a host
    lane."""
    for name in (*NAMES, "host"):
        folder = tmp_path / "devices" / name[0]
        folder.mkdir(parents=True)
        simulated = 'simulator = "x"\n' if name != "host" else ""
        capabilities = '["host"]' if name == "host" else "[]" if name == NAMES[-1] else '["wings"]'
        (folder / "ci.toml").write_text(f'[[lane]]\nname = "{name}"\n{simulated}capabilities = {capabilities}\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / EXCEPTIONS).write_text(ROWS)
    return tmp_path


def item(test: str, *needs: str, **params: Any) -> Any:
    """The attributes of a test that sharing reads."""
    values = "-".join(map(str, params.values()))
    marks = [SimpleNamespace(args=needs or ("device",))]
    made = SimpleNamespace(
        nodeid=f"{test}[{values}]" if params else test,
        path=ROOT / test.partition("::")[0],
        iter_markers=lambda name: marks,
    )
    if params:
        made.callspec = SimpleNamespace(params=params)
    return made


def taken(root: Path, lane: str, items: list[Any], turn: int = 1) -> list[str]:
    found = next(each for each in lanes(root) if each.name == lane)
    left = Sharing(found, turn, ROUNDS, root).left_out(items)
    assert set(left.values()) <= {ELSEWHERE, "another case is taken"}
    return [one.nodeid for one in items if one.nodeid not in left]


def test_a_shared_test_runs_on_exactly_one_lane_and_on_the_next_at_the_next_turn(checkout: Path) -> None:
    items = [item(f"tests/t.py::test_{number}") for number in range(40)]
    turns = [{name: taken(checkout, name, items, turn) for name in NAMES} for turn in range(len(NAMES))]
    for by_lane in turns:
        assert sorted(test for tests in by_lane.values() for test in tests) == sorted(one.nodeid for one in items)
    for one in items:
        assert {name for by_lane in turns for name in NAMES if one.nodeid in by_lane[name]} == set(NAMES)


def test_a_slow_test_is_another_lanes_when_its_turn_comes_again(checkout: Path) -> None:
    one = item("tests/t.py::test_slow")
    takers = [[name for name in NAMES if taken(checkout, name, [one], 3 + ROUNDS * again)] for again in range(4)]
    assert sorted(name for names in takers for name in names) == sorted(NAMES)


def test_only_lanes_that_can_run_a_test_share_it(checkout: Path) -> None:
    items = [item(f"tests/t.py::test_{number}", "wings") for number in range(40)]
    by_lane = {name: taken(checkout, name, items) for name in NAMES}
    assert sorted(test for name in NAMES[:-1] for test in by_lane[name]) == sorted(one.nodeid for one in items)
    assert by_lane[NAMES[-1]] == []


def test_the_host_and_packages_share_nothing_by_the_rule(checkout: Path) -> None:
    items = [item(f"tests/t.py::test_{number}") for number in range(10)]
    assert len(taken(checkout, "host", items)) == 10
    own = [item(f"devices/a/t.py::test_{number}") for number in range(10)]
    assert len(taken(checkout, "a-sim", own)) == 10


def test_exceptions_run_on_every_lane_or_on_one(checkout: Path) -> None:
    every = [item(f"tests/every.py::test_{number}") for number in range(10)]
    assert all(len(taken(checkout, name, every)) == 10 for name in NAMES)
    names = [f"shared_{number}" for number in range(40)]
    runs: list[str] = []
    for lane in NAMES:
        items = [item(f"devices/{lane[0]}/x.py::test[{name}]") for name in (*names, "own")]
        runs += [test.partition("::")[2] for test in taken(checkout, lane, items)]
    assert sorted(runs) == sorted([*(f"test[{name}]" for name in names), *["test[own]"] * len(NAMES)])


def grid() -> list[Any]:
    """Laws of one file, over graphs, seeds and cases."""
    laws = [(f"tests/laws.py::test_{law}", {"graph": g}) for law in range(6) for g in "xyz"]
    laws += [("tests/laws.py::test_seeded", {"graph": g, "seed": seed}) for g in "xyz" for seed in (1, 2)]
    return [item(law, case=case, **others) for case in "ABCDE" for law, others in laws]


def test_every_pair_is_met_and_every_lane_takes_every_law_with_every_other_value(checkout: Path) -> None:
    items, met = grid(), set()
    values = {one.nodeid: {"law": one.nodeid.partition("[")[0], **one.callspec.params} for one in items}
    for lane in NAMES:
        own = [values[test] for test in taken(checkout, lane, items)]
        assert len(own) * 5 == len(items)
        assert len({tuple(v for k, v in params.items() if k != "case") for params in own}) == len(own)
        for params in own:
            met |= set(itertools.combinations(sorted({**params, "lane": lane}.items()), 2))
    for params in values.values():
        for lane in NAMES:
            assert set(itertools.combinations(sorted({**params, "lane": lane}.items()), 2)) <= met


def test_the_order_of_values_is_that_of_the_tests() -> None:
    places = Places(grid())
    first = item("tests/laws.py::test_0", case="A", graph="x")
    assert places.is_turn(first, "case", 0) and not places.is_turn(first, "case", 1)
    assert places.is_turn(item("tests/laws.py::test_0", case="B", graph="y"), "case", 0)


@pytest.mark.parametrize(
    "row", ["", 'runs_on = "every"\nrotates = "case"\n', 'runs_on = "some"\n', 'runs_on = "one"\nspeed = 1\n']
)
def test_a_row_that_can_not_be_used_is_refused(checkout: Path, row: str) -> None:
    (checkout / EXCEPTIONS).write_text(f'[[exception]]\ntests = "t"\nreason = "r"\n{row}')
    with pytest.raises(LaneError, match=r"sharing\.toml"):
        exceptions(checkout)


def test_the_exceptions_of_the_project_name_files_and_lanes_that_are_there() -> None:
    known = {lane.name for lane in lanes() if lane.simulator}
    rows: tuple[SharingRow, ...] = exceptions()
    assert rows
    for row in rows:
        assert any(ROOT.glob(row.tests)) and set(row.lanes) <= known and row.reason, row.tests
