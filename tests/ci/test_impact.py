"""The record of which functions each test runs, the list of changed functions, and the tests
selected from both."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci import changes, impact, near, timings
from ci.functions import MODULE, bodies_of, functions_at
from ci.impact import Impact, Timed
from ci.lanes import ROOT, Lane, LaneError
from ci.selection import Slow, slow_tests
from ci.timings import costs

SOURCE = '''"""A module."""

NUMBER = 1


def first(value):
    """Words."""
    return value + NUMBER


class Thing:
    size = 2

    @property
    def second(self):
        def inner():
            return 3

        return inner()
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with functions."""
    path = tmp_path / "sglcore" / "thing.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


def bits(*lines: int) -> int:
    return sum(1 << line for line in lines)


def test_a_functions_body_is_its_own_lines_without_those_of_a_function_inside(source: Path) -> None:
    assert dict(bodies_of(source)) == {
        "first": bits(7, 8),
        "Thing.second": bits(18, 19),
        "Thing.second.inner": bits(17),
    }


def test_a_changed_line_is_of_the_innermost_function_and_else_of_the_module(source: Path) -> None:
    assert functions_at(source, [3, 12]) == [MODULE]
    assert functions_at(source, [6, 8]) == ["first"]
    assert functions_at(source, [14, 17, 19]) == ["Thing.second", "Thing.second.inner"]


def test_a_file_that_does_not_parse_has_no_functions(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:")
    assert dict(bodies_of(tmp_path / "broken.py")) == {} and functions_at(tmp_path / "broken.py", [1]) == [MODULE]
    assert dict(bodies_of(tmp_path / "gone.py")) == {}


DIFF = """diff --git a/one.py b/one.py
--- a/one.py
+++ b/one.py
@@ -3,2 +3,3 @@ def f():
@@ -9 +11 @@ def g():
@@ -20,2 +21,0 @@ def h():
diff --git a/gone.py b/gone.py
--- a/gone.py
+++ /dev/null
@@ -1,2 +0,0 @@
"""


def test_the_lines_of_a_diff_are_those_of_the_file_as_it_is_now() -> None:
    assert changes.changed_lines(DIFF) == {"one.py": [3, 4, 5, 11, 21, 22]}


@pytest.fixture
def checkout(tmp_path: Path, source: Path) -> Path:
    """A repository with one commit and one test file."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_thing.py").write_text("def test_first(): pass\n")
    (tmp_path / "notes.md").write_text("notes\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        settings = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(("git", *settings, *words), cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_what_has_changed_since_a_commit_are_functions_and_files_of_tests(checkout: Path) -> None:
    first = changes.head(checkout)
    assert len(first) == 40 and changes.commits(checkout) == 1
    assert changes.since(first, checkout) == changes.Changes((), ())
    (checkout / "sglcore" / "thing.py").write_text(SOURCE.replace("value + NUMBER", "value - NUMBER"))
    (checkout / "sglcore" / "new.py").write_text("def newest():\n    return 1\n")
    (checkout / "tests" / "test_thing.py").write_text("def test_second(): pass\n")
    (checkout / "notes.md").write_text("other notes\n")
    found = changes.since(first, checkout)
    assert found.functions == (
        ("sglcore/thing.py", "first"),
        ("sglcore/new.py", "newest"),
        ("sglcore/new.py", MODULE),
    )
    assert found.tests == ("tests/test_thing.py",)
    assert changes.since("0" * 40, checkout).functions == found.functions, "an unknown commit is none"


def test_a_renamed_file_keeps_its_functions_and_its_tests(checkout: Path) -> None:
    first = changes.head(checkout)
    (checkout / "sglcore" / "room").mkdir()
    (checkout / "sglcore" / "thing.py").rename(checkout / "sglcore" / "room" / "other.py")
    (checkout / "tests" / "test_thing.py").rename(checkout / "tests" / "test_other.py")
    (checkout / "sglcore" / "room" / "other.py").write_text(SOURCE.replace("return 3", "return 4"))
    subprocess.run(("git", "add", "-A"), cwd=checkout, check=True, capture_output=True)
    assert changes.since(first, checkout).functions == (("sglcore/room/other.py", "Thing.second.inner"),)
    moved = changes.renames(first, checkout)
    assert moved["sglcore/thing.py"] == "sglcore/room/other.py" and changes.renames("0" * 40, checkout) == {}
    tests = (Timed("cpu", "tests/test_thing.py::test_first", 1.0, False),)
    record = Impact(first, tests, {"sglcore/thing.py": {"first": (0,)}}).renamed(moved)
    assert [each.test for each in record.of(("sglcore/room/other.py", "first"))] == ["tests/test_other.py::test_first"]


def test_without_git_nothing_has_changed(tmp_path: Path) -> None:
    assert changes.commits(tmp_path) == 0 and changes.head(tmp_path) == ""
    assert changes.since("", tmp_path) == changes.Changes((), ())


TESTS = tuple(Timed("cpu", f"t.py::test_{number}", 1.0, number % 2 == 0) for number in range(6))
RECORD = Impact("c", TESTS, {"a.py": {"f": (0, 1, 2), "g": (3, 4, 5)}})


def chosen(functions: list[tuple[str, str]], seconds: float, **others: object) -> list[str]:
    found = impact.choose(RECORD, functions, seconds, lambda each: True, **others)  # type: ignore[arg-type]
    return [each.test[-1] for each in found]


def test_each_function_gets_its_first_test_before_any_gets_a_second() -> None:
    both = [("a.py", "f"), ("a.py", "g")]
    assert chosen(both, 3.0) == ["0", "3", "1"] and chosen(both, 100.0) == ["0", "3", "1", "4", "2", "5"]
    assert chosen(both, 2.0, first=(TESTS[5],)) == ["5", "0"]


def test_a_function_that_is_not_known_has_the_tests_of_its_file() -> None:
    assert chosen([("a.py", "new")], 2.0) == ["0", "3"]
    assert chosen([("b.py", "new")], 2.0) == []


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    impact.save(RECORD, tmp_path)
    assert impact.load(tmp_path) == RECORD and impact.load(tmp_path / "nowhere") is None


def test_a_test_costs_its_processors_seconds_and_its_part_of_the_fixtures() -> None:
    ran = {"outcome": "passed", "seconds": 0.2, "processor": 0.6}
    waits = {"outcome": "failed", "seconds": 2.0, "processor": 0.1}
    skipped = {"outcome": "skipped", "seconds": 0.0}
    record = {
        "tests": {"a.py::x": ran, "a.py::y": waits, "b.py::z": ran, "b.py::s": skipped},
        "fixtures": {"a.py": 4.0},
    }
    assert costs(record) == {"a.py::x": 2.1, "a.py::y": 3.0, "b.py::z": 0.6}


def test_a_test_costs_what_it_does_on_its_slowest_lane_and_changes_sides_with_a_margin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timings, "groups", lambda: ())
    paths = []
    for lane, seconds in {"one": (0.1, 0.55, 0.45, 0.3), "two": (0.9, 0.55, 0.45, 0.3)}.items():
        ran = {f"devices/{lane}/t.py::{name}": seconds[place] for place, name in enumerate("abcd")}
        tests = {name: {"outcome": "passed", "seconds": cost, "processor": cost} for name, cost in ran.items()}
        paths.append(tmp_path / f"{lane}.json")
        paths[-1].write_text(json.dumps({"lane": lane, "tests": tests}))
    before = Slow(frozenset(f"devices/*/t.py::{name}" for name in ("c", "d", "idle")))
    found = timings.slow_of(paths, before)
    assert found == Slow(frozenset(f"devices/*/t.py::{name}" for name in ("a", "c", "idle")), 1)
    (tmp_path / "ci").mkdir()
    assert timings.write_slow(found, tmp_path) == (3, 0)
    assert timings.write_slow(Slow(frozenset({"x"}), 2), tmp_path) == (1, 3)
    assert slow_tests(tmp_path) == Slow(frozenset({"x"}), 2)


def test_the_cheapest_run_always_while_they_fit_and_the_turns_share_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timings, "groups", lambda: ())
    monkeypatch.setattr(timings, "ALWAYS", 1.0)
    monkeypatch.setattr(timings, "TURN", 0.5)
    costs = {f"t.py::test_{number}": 0.1 * number for number in range(1, 5)}
    paths = []
    for lane in ("one", "two"):  # each test costs as much on both: 0.2, 0.4, 0.6 and 0.8 seconds together
        tests = {name: {"outcome": "passed", "seconds": cost, "processor": cost} for name, cost in costs.items()}
        paths.append(tmp_path / f"{lane}.json")
        paths[-1].write_text(json.dumps({"lane": lane, "tests": tests}))
    found = timings.slow_of(paths, Slow())
    assert found == Slow(frozenset({"t.py::test_3", "t.py::test_4"}), 3)


def test_tests_of_a_file_with_costly_fixtures_go_by_the_files_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timings, "groups", lambda: ())
    ran = {"outcome": "passed", "seconds": 0.1, "processor": 0.1}
    record = {
        "lane": "one",
        "tests": {"devices/one/a.py::x": ran, "devices/one/a.py::y": ran, "b.py::z": ran},
        "fixtures": {"devices/one/a.py": 3.0, "b.py": 0.2},
    }
    path = tmp_path / "one.json"
    path.write_text(json.dumps(record))
    before = Slow(frozenset({"devices/*/a.py::y", "devices/*/a.py::w"}))
    found = timings.slow_of([path], before)
    assert found.names == {"devices/*/a.py", "devices/*/a.py::w"}, "what did not run keeps its place"
    assert found.name_of("devices/two/a.py::x") == "devices/*/a.py" and found.name_of("b.py::z") == ""
    assert [each.is_slow for each in timings.timed([path], found)] == [True, True, False]


@pytest.fixture
def planted() -> Iterator[Path]:
    """A test file in the checkout: one test runs a function of the core, another starts a process
    that runs a second function."""
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="planted_", dir=ROOT / "build"))
    (folder / "test_planted.py").write_text(
        "import subprocess, sys\n"
        "from sglcore.device.pci import PciClaim\n"
        "from sglcore.config.settings import setting\n"
        "CHILD = 'from sglcore.device.import_references import modules; modules(\"a:b\")'\n"
        "def test_own():\n"
        "    from sglcore.device.import_references import resolve\n"
        "    resolve('json:dumps')\n"
        "def test_child(): subprocess.run([sys.executable, '-c', CHILD], check=True)\n"
    )
    yield folder
    shutil.rmtree(folder)


def test_a_watched_run_records_what_a_test_and_the_processes_that_it_starts_run(planted: Path, tmp_path: Path) -> None:
    words = ("-m", "pytest", "-n0", "-p", "no:cacheprovider", f"--impact={tmp_path / 'raw' / 'cpu'}", str(planted))
    ran = subprocess.run((sys.executable, *words), cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    file = planted.relative_to(ROOT).as_posix() + "/test_planted.py"
    timed = [Timed("cpu", f"{file}::{name}", 1.0, False) for name in ("test_own", "test_child")]
    record = impact.gather(tmp_path / "raw", timed, "c")
    assert record.commit == "c"
    refs = "sglcore/device/import_references.py"
    assert [each.test for each in record.of((refs, "resolve"))] == [f"{file}::test_own"]
    assert {each.test for each in record.of((refs, "modules"))} == {f"{file}::test_own", f"{file}::test_child"}


def part_of(test: str) -> int:
    return zlib.crc32(test.encode()) % impact.PARTS


def test_what_a_record_says_of_tests_that_were_not_watched_stays(planted: Path, tmp_path: Path) -> None:
    file = planted.relative_to(ROOT).as_posix() + "/test_planted.py"
    own = f"{file}::test_own"
    idle = next(name for name in (f"{file}::test_{number}" for number in range(99)) if part_of(name) != part_of(own))
    with (planted / "test_planted.py").open("a") as tests:
        tests.write(f"def {idle.partition('::')[2]}():\n    test_own()\n")
    refs = "sglcore/device/import_references.py"
    known = tuple(Timed("cpu", name, 9.0, True, functions=5) for name in (own, idle, f"{file}::test_gone"))
    functions = {"resolve": (0, 1, 2), "modules": (0, 1, 2), "no_longer_here": (1,)}
    before = Impact("b", known, {refs: functions}, part=2)
    options = (f"--impact={tmp_path / 'raw' / 'cpu'}", f"--impact-part={part_of(own)}")
    tests = f"{planted}/test_planted.py"
    words = ("-m", "pytest", "-n0", "-p", "no:cacheprovider", *options, tests, "-k", "not child")
    ran = subprocess.run((sys.executable, *words), cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    record = impact.gather(tmp_path / "raw", [Timed("cpu", name, 1.0, False) for name in (own, idle)], "c", before)
    assert "no_longer_here" not in record.functions[refs]
    assert [each.test for each in record.of((refs, "modules"))] == [idle], "the other was watched, and does not run it"
    assert {each.test for each in record.of((refs, "resolve"))} == {own, idle}
    counts = {each.test: each.functions for each in record.tests}
    assert counts[idle] == 5 and counts[own] not in (0, 5)
    assert record.part == 3 and record.commit == "c"


def test_every_test_is_watched_in_one_part_and_the_parts_follow_each_other() -> None:
    tests = [f"t.py::test_{number}" for number in range(200)]
    parts = [{test for test in tests if impact.is_due(test, part)} for part in range(impact.PARTS)]
    assert set().union(*parts) == set(tests) and sum(map(len, parts)) == len(tests)
    assert min(map(len, parts)) > 10, "none is much smaller"
    turns = [impact.next_part(None)]
    for _ in range(impact.PARTS):
        turns.append(impact.next_part(Impact("c", (), {}, part=turns[-1])))
    assert turns == [*range(impact.PARTS), 0]


def test_a_narrow_loop_without_a_record_or_of_no_file_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(impact, "load", lambda: None)
    with pytest.raises(LaneError, match="make test-all"):
        near.loop([], 1.0, ())
    monkeypatch.setattr(impact, "load", lambda: RECORD)
    with pytest.raises(LaneError, match="nowhere.py is no file"):
        near.loop(["nowhere.py"], 1.0, ())


def test_a_narrow_loop_runs_the_nearest_tests_on_the_lanes_that_run_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lanes = (
        Lane(name="cpu", device="x", capabilities=frozenset({"host", "package.x"})),
        *(Lane(name=f"{name}-sim", device=name, capabilities=frozenset({"device", "streams"})) for name in "abc"),
    )
    tests = [Timed("cpu", "tests/t.py::test_h", 1.0, False)]
    tests += [Timed(f"{name}-sim", f"tests/t.py::test_{place}", 1.0, True) for place, name in enumerate("abbcc")]
    known = "sglcore/schedule/scheduler.py"
    record = Impact("c", tuple(tests), {known: {"Scheduler.finish": tuple(range(len(tests)))}})
    monkeypatch.setattr(impact, "load", lambda: record)
    monkeypatch.setattr(changes, "since", lambda commit: changes.Changes(((known, "Scheduler.finish"),), ()))
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        near.run, "run_each", lambda each: asked.extend((lane.name, words) for lane, words in each) or []
    )
    assert near.loop([known], 40.0, lanes) == 0
    assert [name for name, _ in asked] == ["cpu", "b-sim"], "the host's and the one with most of the others"
    assert "near 1 functions: tests: 1 on cpu, 2 on b-sim" in capsys.readouterr().out
    asked.clear()
    assert near.loop(["tests/runtime/test_accelerator.py"], 40.0, lanes) == 0
    assert asked and "host" not in asked[0][0], "a file that the record does not know runs where its needs are met"


def test_slow_tests_near_what_no_commit_has_yet_come_first_and_by_the_list_of_today(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes = (Lane(name="cpu", device="x", capabilities=frozenset()),)
    tests = [
        Timed("cpu", f"{file}.py::test_{place}", 10.0, False) for file in ("old", "new", "own") for place in range(9)
    ]
    places = {
        file: tuple(place for place, each in enumerate(tests) if each.test.startswith(file)) for file in ("old", "new")
    }
    record = Impact("c", tuple(tests), {"s.py": {"f": places["old"], "g": places["new"]}})
    monkeypatch.setattr(impact, "load", lambda: record)
    monkeypatch.setattr(near, "slow_tests", lambda: Slow(frozenset({"old.py", "new.py", "own.py", "own.py::test_3"})))
    found = {
        "HEAD": changes.Changes((("s.py", "g"),), ()),
        "c": changes.Changes((("s.py", "g"), ("s.py", "f")), ("own.py",)),
    }
    monkeypatch.setattr(changes, "since", found.__getitem__)
    monkeypatch.setattr(near, "ADDED", 80.0)
    chosen = [each.test.partition(".")[0] for each in near.slow_near(lanes)]
    assert chosen[:4] == ["new"] * 4, "half of the time"
    assert chosen.count("old") and chosen.count("own") == 2 and len(chosen) == 8
    monkeypatch.setattr(near, "slow_tests", lambda: Slow())
    assert near.slow_near(lanes) == [], "what is cheap runs anyway"
