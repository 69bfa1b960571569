"""A group is fresh while the code it covers equals the code of its last complete pass; any other
change makes it stale."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci import groups as module
from ci.groups import Group, group_named, group_of, groups, passed_whole, store, stored
from ci.lanes import ROOT, Lane, LaneError, lanes
from ci.pytest_lanes import took_all

ROW = """[[group]]
name = "one"
lane = "x"
tests = ["tests/a/test_*.py::*", "tests/test_b.py::test_c"]
sources = ["src/**/*.py"]
pins = ["lib"]
share = 5
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one group over two files."""
    for name, text in {
        "tests/ci.toml": ROW,
        "src/a.py": "1",
        "src/b/c.py": "2",
        "constraints.txt": "lib==1\no==1\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "ci").mkdir()
    return tmp_path


def test_a_group_is_fresh_until_a_file_a_name_or_a_pin_of_it_changes(checkout: Path) -> None:
    (group,) = groups(checkout)
    assert not group.is_fresh(checkout)
    store({"one": group.digest(checkout)}, checkout)
    assert group.is_fresh(checkout)
    (checkout / "src" / "other.txt").write_text("not a source")
    (checkout / "constraints.txt").write_text("lib==1\no==2\n")
    assert group.is_fresh(checkout)
    changes = {"src/a.py": "3", "src/d.py": "", "constraints.txt": "lib==2\n", "tests/a/test_x.py": "its own"}
    for name, text in changes.items():
        store({"one": group.digest(checkout)}, checkout)
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text(text)
        assert not group.is_fresh(checkout), name
    store({"one": group.digest(checkout)}, checkout)
    (checkout / "src" / "a.py").rename(checkout / "src" / "e.py")
    assert not group.is_fresh(checkout)
    store({"one": group.digest(checkout)}, checkout)
    (checkout / "src" / "e.py").rename(checkout / "src" / "f.py")
    assert not group.is_fresh(checkout), "the files and their order are the same"


def test_each_group_has_a_file_and_what_is_no_longer_declared_is_forgotten(checkout: Path) -> None:
    assert store({"one": "1", "gone": "2"}, checkout) == ["one"]
    (checkout / "ci" / "digests" / "gone").write_text("3\n")
    assert store({"one": "1"}, checkout) == []
    assert stored(checkout) == {"one": "1"}
    assert [path.name for path in (checkout / "ci" / "digests").iterdir()] == ["one"]


def test_a_test_is_of_the_group_that_names_it(checkout: Path) -> None:
    (group,) = groups(checkout)
    assert group.has("tests/a/test_x.py::test_y[1-a/b]") and group.has("tests/test_b.py::test_c[2]")
    assert not group.has("tests/test_b.py::test_d") and not group.has("tests/b/test_x.py::test_y")


def test_a_pattern_with_a_bracket_takes_some_parameters_of_a_test() -> None:
    group = Group(name="some", lane="x", tests=("tests/test_b.py::test_c[[]*/fast*",), sources=(), share=5)
    assert group.has("tests/test_b.py::test_c[one/faster]") and group.has("tests/test_b.py::test_c[[two/fast]]")
    assert not group.has("tests/test_b.py::test_c[one/slow]") and not group.has("tests/test_b.py::test_c")


LANES = """
[[lane]]
name = "one-sim"
capabilities = []
simulator = "one"

[[lane]]
name = "one-alone"
capabilities = []
tests = ["devices/one/tests"]

[[lane]]
name = "one-card"
capabilities = []
runner = ["a"]

[[lane]]
name = "one-own"
capabilities = []
group = "own"
"""
EVERYWHERE = """
[[group]]
name = "all"
lane = "*"
tests = ["devices/{device}/tests/*::*", "tests/a/*::*", "simulator/tests/*::*"]
sources = ["devices/{device}/one.py"]
share = 5
skips = true
"""


@pytest.fixture
def everywhere(checkout: Path) -> tuple[Group, ...]:
    """The groups of a checkout with four lanes; the last row of its groups applies to every
    lane."""
    package = checkout / "devices" / "one"
    package.mkdir(parents=True)
    (package / "ci.toml").write_text(LANES)
    (checkout / "tests" / "ci.toml").write_text(ROW + EVERYWHERE)
    return groups(checkout)


def test_a_row_for_many_lanes_is_a_group_on_each_that_runs_anywhere(everywhere: tuple[Group, ...]) -> None:
    found = {group.name: group for group in everywhere}
    assert list(found) == ["one", "all-one-alone", "all-one-sim"]
    alone, sim = found["all-one-alone"], found["all-one-sim"]
    assert (alone.lane, sim.lane) == ("one-alone", "one-sim") and alone.skips and sim.skips
    assert alone.sources == sim.sources == ("devices/one/one.py",)
    assert alone.tests == ("devices/one/tests/*::*",)
    assert sim.tests == ("devices/one/tests/*::*", "tests/a/*::*", "simulator/tests/*::*")


def test_a_test_is_of_the_first_group_that_has_it(everywhere: tuple[Group, ...]) -> None:
    both = [group for group in everywhere if group.has("tests/a/test_x.py::test_y")]
    assert [group.name for group in both] == ["one", "all-one-sim"]
    assert group_of("tests/a/test_x.py::test_y", everywhere) is both[0]
    assert group_of("tests/a/other.py::test_y", everywhere) is both[1]
    assert group_of("tests/b/test_x.py::test_y", everywhere) is None


@pytest.mark.parametrize("text", [ROW + "speed = 1\n", ROW.replace("share = 5\n", ""), ROW + ROW])
def test_a_row_that_can_not_be_used_is_refused(checkout: Path, text: str) -> None:
    (checkout / "tests" / "ci.toml").write_text(text)
    with pytest.raises(LaneError):
        groups(checkout)


def test_an_unknown_group_is_an_error_that_lists_the_known(checkout: Path) -> None:
    with pytest.raises(LaneError, match="there is no group 'two'; there are: one"):
        group_named("two", groups(checkout))


@pytest.mark.parametrize(
    ("outcomes", "whole", "skips", "found"),
    [
        ({"t.py::a": "passed", "u.py::b": "failed"}, {"one": "1"}, False, {"one": "1"}),
        ({"t.py::a": "passed", "t.py::b": "failed"}, {"one": "1"}, True, {}),
        ({"t.py::a": "passed", "t.py::b": "skipped"}, {"one": "1"}, False, {}),
        ({"t.py::a": "passed", "t.py::b": "skipped"}, {"one": "1"}, True, {"one": "1"}),
        ({"t.py::b": "skipped"}, {"one": "1"}, True, {}),
        ({"t.py::a": "passed"}, {}, False, {}),
        ({"u.py::b": "passed"}, {"one": "1"}, False, {}),
    ],
)
def test_only_a_whole_pass_renews_in_which_nothing_was_skipped_that_no_other_lane_runs(
    monkeypatch: pytest.MonkeyPatch,
    outcomes: dict[str, str],
    whole: dict[str, str],
    skips: bool,
    found: dict[str, str],
) -> None:
    one = Group(name="one", lane="x", tests=("t.py::*",), sources=(), share=1, skips=skips)
    rest = Group(name="rest", lane="x", tests=("*::*",), sources=(), share=1)
    other = Group(name="other", lane="y", tests=("t.py::*",), sources=(), share=1)
    monkeypatch.setattr(module, "groups", lambda: (other, one, rest))
    record: dict[str, Any] = {"lane": "x", "tests": {test: {"outcome": was} for test, was in outcomes.items()}}
    assert passed_whole(record | {"whole": whole}) == found


def test_the_groups_of_the_project_cover_what_is_there() -> None:
    names = {lane.name for lane in lanes()}
    for group in groups():
        assert group.lane in names and 0 <= group.share <= 100
        empty = [pattern for pattern in group.sources if not any(ROOT.glob(pattern))]
        empty += [pattern for pattern in group.tests if not any(ROOT.glob(pattern.partition("::")[0]))]
        assert not empty, f"{group.name} names {', '.join(empty)}"


def test_a_pin_of_a_group_is_pinned() -> None:
    files = ROOT.glob("constraints*.txt")
    pinned = {line.partition("==")[0] for path in files for line in path.read_text().splitlines()}
    for group in groups():
        assert set(group.pins) <= pinned, group.name


def test_a_lane_of_a_group_is_that_groups_own() -> None:
    for lane in lanes():
        assert not lane.group or group_named(lane.group, groups()).lane == lane.name


@pytest.mark.parametrize(
    ("asked", "status", "args", "took"),
    [
        ({}, 0, ["tests", "more"], True),
        ({}, 1, ["tests"], True),
        ({}, 2, ["tests"], False),
        ({}, 0, ["tests/a"], False),
        ({"keyword": "law"}, 0, ["tests"], False),
        ({"markexpr": "needs"}, 0, ["tests"], False),
        ({"deselect": ["tests/a"]}, 0, ["tests"], False),
        ({"maxfail": 1}, 1, ["tests"], False),
    ],
)
def test_only_a_run_of_the_whole_lane_to_its_end_renews(
    asked: dict[str, Any], status: int, args: list[str], took: bool
) -> None:
    lane = Lane(name="x", device="x", capabilities=frozenset(), folders=("tests",))
    option = SimpleNamespace(**{"keyword": "", "markexpr": "", "deselect": None, "maxfail": 0, **asked})
    config: Any = SimpleNamespace(option=option, args=args)
    assert took_all(lane, config, status) is took


def test_every_stored_digest_is_of_a_group() -> None:
    assert stored().keys() <= {group.name for group in groups()}


def test_the_compiled_part_of_the_simulator_is_of_a_group_on_every_simulated_lane() -> None:
    sources = set((ROOT / "simulator" / "csrc").glob("*.cpp"))
    covering = {group.lane for group in groups() if sources <= set(group.files())}
    assert sources and covering == {lane.name for lane in lanes() if lane.simulator}
