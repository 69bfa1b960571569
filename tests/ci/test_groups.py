"""A group is fresh as long as what it covers is what it was when it last passed whole; anything else makes it stale."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci import groups as module
from ci.groups import Group, group_named, groups, passed_whole, store, stored
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


def test_what_is_no_longer_declared_is_forgotten(checkout: Path) -> None:
    store({"one": "1", "gone": "2"}, checkout)
    assert stored(checkout) == {"one": "1"}


def test_a_test_is_of_the_group_that_names_it(checkout: Path) -> None:
    (group,) = groups(checkout)
    assert group.has("tests/a/test_x.py::test_y[1-a/b]") and group.has("tests/test_b.py::test_c[2]")
    assert not group.has("tests/test_b.py::test_d") and not group.has("tests/b/test_x.py::test_y")


def test_a_pattern_with_a_bracket_takes_some_parameters_of_a_test() -> None:
    group = Group(name="some", lane="x", tests=("tests/test_b.py::test_c[[]*/fast*",), sources=(), share=5)
    assert group.has("tests/test_b.py::test_c[one/faster]") and group.has("tests/test_b.py::test_c[[two/fast]]")
    assert not group.has("tests/test_b.py::test_c[one/slow]") and not group.has("tests/test_b.py::test_c")


@pytest.mark.parametrize("text", [ROW + "speed = 1\n", ROW.replace("share = 5\n", ""), ROW + ROW])
def test_a_row_that_can_not_be_used_is_refused(checkout: Path, text: str) -> None:
    (checkout / "tests" / "ci.toml").write_text(text)
    with pytest.raises(LaneError):
        groups(checkout)


def test_an_unknown_group_is_an_error_that_lists_the_known(checkout: Path) -> None:
    with pytest.raises(LaneError, match="there is no group 'two'; there are: one"):
        group_named("two", groups(checkout))


@pytest.mark.parametrize(
    ("outcomes", "whole", "found"),
    [
        ({"t.py::a": "passed", "u.py::b": "failed"}, {"one": "1"}, {"one": "1"}),
        ({"t.py::a": "passed", "t.py::b": "failed"}, {"one": "1"}, {}),
        ({"t.py::a": "passed", "t.py::b": "skipped"}, {"one": "1"}, {}),
        ({"t.py::a": "passed"}, {}, {}),
        ({"u.py::b": "passed"}, {"one": "1"}, {}),
    ],
)
def test_only_a_whole_pass_in_which_nothing_was_skipped_renews(
    monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, str], whole: dict[str, str], found: dict[str, str]
) -> None:
    one = Group(name="one", lane="x", tests=("t.py::*",), sources=(), share=1)
    monkeypatch.setattr(module, "groups", lambda: (one,))
    record: dict[str, Any] = {"tests": {test: {"outcome": was} for test, was in outcomes.items()}, "whole": whole}
    assert passed_whole(record) == found


def test_the_groups_of_the_project_cover_what_is_there() -> None:
    names = {lane.name for lane in lanes()}
    for group in groups():
        assert group.lane in names and 0 <= group.share <= 100
        empty = [pattern for pattern in group.sources if not any(ROOT.glob(pattern))]
        empty += [pattern for pattern in group.tests if not any(ROOT.glob(pattern.partition("::")[0]))]
        assert not empty, f"{group.name} names {', '.join(empty)}"


def test_a_pin_of_a_group_is_pinned() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
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
