"""The output of a run: a class for its failure, a record of each test, and a table that lists every
test."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci import pytest_lanes
from ci.lanes import HOST, ROOT, Lane, lanes
from ci.pytest_lanes import LaneRun
from ci.run import Failure, classify, command, environ, report, run, run_all
from ci.selection import Selection
from ci.sharing import ELSEWHERE
from ci.table import markdown, read, summary


@pytest.mark.parametrize(
    ("status", "output", "failure"),
    [
        (0, "", None),
        (1, "FAILED tests/x.py::test_y", Failure.PRODUCT),
        (1, "worker 'gw1' crashed while running 'tests/x.py'", Failure.INFRA),
        (-9, "", Failure.INFRA),
        (137, "", Failure.INFRA),
        (1, "OSError: [Errno 28] No space left on device", Failure.INFRA),
        (2, "ERROR tests/x.py - SyntaxError", Failure.COLLECT),
        (5, "no tests ran", Failure.COLLECT),
        (4, "ModuleNotFoundError: No module named 'numpy'", Failure.IMAGE),
        (3, "the simulator could not be built", Failure.IMAGE),
    ],
)
def test_a_failure_has_a_class(status: int, output: str, failure: Failure | None) -> None:
    assert classify(status, output) is failure


def test_a_lane_is_run_by_its_interpreter_with_its_name_its_simulator_and_its_record() -> None:
    for lane in lanes():
        words = command(lane, 3)
        assert (words[0] == sys.executable) != bool(lane.environment)
        assert [word for word in words if word.startswith("--ignore")] == [f"--ignore={file}" for file in lane.ignore]
        assert f"--lane={lane.name}" in words and "-n3" in words
        assert (f"--sim={lane.simulator}" in words) == bool(lane.simulator)


def test_what_processes_import_is_compiled_once_though_the_environment_forbids_it() -> None:
    found = environ({"PATH": "/bin", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "4"})
    assert found.keys() == {"PATH", "OMP_NUM_THREADS", "PYTEST_ADDOPTS"} and found["OMP_NUM_THREADS"] == "4"


def test_the_hosts_lane_runs_last_and_in_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[str, int]] = []

    def told(lane: Lane, workers: int, *rest: object) -> tuple[str, ...]:
        ran.append((lane.name, workers))
        return (sys.executable, "-c", "")

    monkeypatch.setattr("ci.run.RECORDS", tmp_path)
    monkeypatch.setattr("ci.run.RAW", tmp_path)
    monkeypatch.setattr("ci.run.prepare", lambda lane: None)
    monkeypatch.setattr("ci.run.command", told)
    here = [lane for lane in lanes() if not lane.needs_hardware]
    assert [each.lane for each in run_all(here, 2)] == [*here[1:], here[0]]
    assert len(ran) == len(here) and ran[-1] == (here[0].name, 2) and {workers for _, workers in ran[:-1]} == {1}


def test_what_failed_is_named_at_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "print('FAILED a.py::one - assert 0\\nERROR b.py::two\\n  FAILED in a text'); raise SystemExit(1)"
    monkeypatch.setattr("ci.run.RECORDS", tmp_path)
    monkeypatch.setattr("ci.run.RAW", tmp_path)
    monkeypatch.setattr("ci.run.command", lambda *given: (sys.executable, "-c", said))
    text = report([run(lanes()[0], 1)])
    assert text.endswith(f"{lanes()[0].name:<14} FAILED a.py::one - assert 0\n  {lanes()[0].name:<14} ERROR b.py::two")


def record(folder: Path, lane: str, tests: dict, left_out: dict) -> Path:
    path = folder / f"{lane}.json"
    path.write_text(json.dumps({"lane": lane, "at": 0, "tests": tests, "left_out": left_out}))
    return path


def test_the_table_shows_every_test_and_names_what_ran_nowhere(tmp_path: Path) -> None:
    gaps = tmp_path / "devices" / "two" / "sglcore_two" / "gaps.toml"
    gaps.parent.mkdir(parents=True)
    gaps.write_text('[[gap]]\nlaw = "a_law"\nreason = "r"\nlink = "l"\nexpiry = 2030-01-01\n')
    passed = {"outcome": "passed", "seconds": 1.0}
    one = record(tmp_path, "one", {"t.py::a": passed}, {"t.py::b": ["streams"], "t.py::c": ["wings"]})
    skip = {"outcome": "skipped", "seconds": 0.0, "reason": "needs a screen"}
    two = record(tmp_path, "two", {"t.py::b": passed, "t.py::d": skip}, {"t.py::c": ["wings"]})
    table = read([one, two], tmp_path)
    assert table.never_ran == ("t.py::c", "t.py::d")
    assert table.why_not("t.py::c") == "one: needs wings; two: needs wings"
    text = markdown(table)
    assert "| t.py::a | yes | - |" in text and "| t.py::b | - | yes |" in text
    assert "t.py::d on two: needs a screen" in text and "two: a_law" in text
    assert "1970-01-01" in text and "t.py" in summary(table)


def test_a_lane_that_did_not_begin_is_in_the_table_without_a_test(tmp_path: Path) -> None:
    one = record(tmp_path, "one", {"t.py::a": {"outcome": "passed", "seconds": 1.0}}, {})
    text = markdown(read([one, record(tmp_path, "two", {}, {})], tmp_path))
    assert "| t.py::a | yes | - |" in text and "Last run: one 1970-01-01" in text


def test_what_only_hardware_can_run_waits_for_it_and_what_nothing_can_run_is_red(tmp_path: Path) -> None:
    folder = tmp_path / "devices" / "one"
    folder.mkdir(parents=True)
    lanes = '[[lane]]\nname = "one"\n[[lane]]\nname = "one-card"\ncapabilities = ["card"]\nrunner = ["x"]\n'
    (folder / "ci.toml").write_text(lanes)
    left_out = {"t.py::card": ["card"], "t.py::wings": ["wings"], "t.py::both": ["card", "wings"]}
    ran = record(tmp_path, "one", {"t.py::a": {"outcome": "passed", "seconds": 1.0}}, left_out)
    table = read([ran], tmp_path)
    assert table.waiting == {"one-card": 1} and table.waits_for("t.py::card") == "one-card"
    assert table.never_ran == ("t.py::both", "t.py::wings")
    card = record(tmp_path, "one-card", {}, {"t.py::card": ["wings"]})
    assert "t.py::card" in read([ran, card], tmp_path).never_ran


def test_what_a_sample_leaves_is_counted_and_what_no_lane_took_in_turn_is_red(tmp_path: Path) -> None:
    passed = {"outcome": "passed", "seconds": 1.0}
    names = ("one", "two")
    paths = [
        record(tmp_path, name, {f"devices/{name}/t.py::b" if name == "one" else "t.py::a": passed}, {})
        for name in names
    ]
    values = json.loads(paths[1].read_text())
    values["not_taken"] = {"t.py::sampled": "not drawn"}
    values["not_taken"] |= {"devices/two/t.py::b": ELSEWHERE, "devices/two/t.py::nobodys": ELSEWHERE}
    values["not_taken"] |= {"devices/two/t.py::later": ELSEWHERE}
    paths[1].write_text(json.dumps(values))
    values = json.loads(paths[0].read_text())
    values["not_taken"] = {"devices/one/t.py::later": "not drawn on the lane whose turn it is"}
    paths[0].write_text(json.dumps(values))
    table = read(paths, tmp_path)
    assert table.never_ran == ("devices/two/t.py::nobodys",) and table.not_taken == 2
    assert "| t.py::sampled | - | . |" in markdown(table)


def test_what_only_the_lane_of_a_group_can_run_waits_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "devices" / "one"
    folder.mkdir(parents=True)
    lanes = '[[lane]]\nname = "one"\n[[lane]]\nname = "far"\ncapabilities = ["far"]\ngroup = "far"\n'
    (folder / "ci.toml").write_text(lanes)
    table = read([record(tmp_path, "one", {}, {"t.py::far": ["far"], "t.py::wings": ["wings"]})], tmp_path)
    assert table.waiting == {"far": 1} and table.never_ran == ("t.py::wings",)


def test_a_law_of_the_kit_is_one_test_whichever_package_runs_it(tmp_path: Path) -> None:
    passed, skip = (
        {"outcome": "passed", "seconds": 1.0},
        {"outcome": "skipped", "seconds": 0.0, "reason": "large pages"},
    )
    file = "tests/test_conformance.py::test_law[C2-retraction]"
    one = record(tmp_path, "one", {f"devices/one/{file}": passed, "devices/one/tests/test_x.py::a": passed}, {})
    two = record(tmp_path, "two", {f"devices/two/{file}": skip, "devices/two/tests/test_x.py::a": skip}, {})
    table = read([one, two], tmp_path)
    assert table.never_ran == ("devices/two/tests/test_x.py::a",)
    assert {lane: cell.outcome for lane, cell in table.tests[f"devices/*/{file}"].items()} == {
        "one": "passed",
        "two": "skipped",
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_lane_can_not_run_is_left_out_and_recorded(tmp_path: Path, workers: int) -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="planted_", dir=ROOT / "build"))
    source = (
        "import pytest\n"
        "def test_plain(): pass\n"
        "@pytest.mark.needs('wings')\ndef test_flies(): pass\n"
        "@pytest.mark.needs('device')\ndef test_device(lane): assert 'device' in lane.capabilities\n"
        "def test_skips(): pytest.skip('needs a screen')\n"
        "def test_fails(): assert 0\n"
    )
    (folder / "test_planted.py").write_text(source)
    out = tmp_path / "record.json"
    words = (sys.executable, "-m", "pytest", f"-n{workers}", "-p", "no:cacheprovider", f"--lane-record={out}")
    try:
        ran = subprocess.run((*words, str(folder)), cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(folder)
    assert ran.returncode == 1, ran.stdout
    values = json.loads(out.read_text())
    outcomes = {name.rpartition("::")[2]: known["outcome"] for name, known in values["tests"].items()}
    assert outcomes == {
        "test_plain": "passed",
        "test_device": "passed",
        "test_skips": "skipped",
        "test_fails": "failed",
    }
    assert [(name.rpartition("::")[2], why) for name, why in values["left_out"].items()] == [("test_flies", ["wings"])]
    assert [known["reason"] for known in values["tests"].values() if "reason" in known] == ["needs a screen"]
    assert values["whole"] == {}, "a run of some files renews no group"


def test_what_a_worker_left_to_others_is_in_the_record(tmp_path: Path) -> None:
    lane, out = Lane(name="x", device="x", capabilities=frozenset()), tmp_path / "record.json"
    handed = {"left_out": {"t.py::flies": ["wings"]}, "not_taken": {"t.py::other": ELSEWHERE}}
    option = SimpleNamespace(keyword="", markexpr="", deselect=None, maxfail=0)
    run = LaneRun(lane, Selection(lane), str(out))
    session: Any = SimpleNamespace(config=SimpleNamespace(option=option, args=[]))
    run.pytest_testnodedown(SimpleNamespace(workeroutput=handed))
    run.pytest_sessionfinish(session, 0)
    values = json.loads(out.read_text())
    assert {name: values[name] for name in handed} == handed


def test_what_a_session_shares_is_no_files_cost(tmp_path: Path) -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    folder, out = Path(tempfile.mkdtemp(prefix="planted_", dir=ROOT / "build")), tmp_path / "record.json"
    (folder / "test_planted.py").write_text(
        "import pytest, time\n"
        "@pytest.fixture(scope='session')\ndef server(): time.sleep(0.8)\n"
        "@pytest.fixture(scope='module')\ndef model(server): time.sleep(0.3)\n"
        "def test_x(model): pass\n"
        "def test_y(model): pass\n"
    )
    words = (sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", f"--lane-record={out}", str(folder))
    try:
        subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        shutil.rmtree(folder)
    (seconds,) = json.loads(out.read_text())["fixtures"].values()
    assert 0.3 <= seconds < 0.8


def test_a_run_on_the_wrong_lane_says_which_lane_is_right() -> None:
    (ROOT / "build").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="planted_", dir=ROOT / "build"))
    (folder / "test_planted.py").write_text("import pytest\n@pytest.mark.needs('streams')\ndef test_x(): pass\n")
    words = (sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", str(folder))
    try:
        ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(folder)
    able = next(lane.name for lane in lanes() if not lane.needs_hardware and "streams" in lane.capabilities)
    assert f"1 tests need streams, which lane {lanes()[0].name} does not offer; run them on {able}" in ran.stdout


def test_a_devices_lane_imports_files_with_needs_of_their_own_or_of_a_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest_lanes, "ROOT", tmp_path)
    device, host = (Lane(name="x", device="x", capabilities=frozenset(given)) for given in ((), (HOST,)))
    of_device, of_host = (LaneRun(lane, Selection(lane), "") for lane in (device, host))
    laws = tmp_path / "tests" / "laws"
    texts = {
        laws / "states" / "deep" / "test_x.py": "",
        laws / "conftest.py": 'pytest.mark.needs("streams")',
        tmp_path / "tests" / "engine" / "test_own.py": 'pytestmark = pytest.mark.needs("streams")',
        tmp_path / "tests" / "engine" / "test_host.py": "",
        tmp_path / "devices" / "x" / "tests" / "test_y.py": "",
    }
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    ignored = [file.name for file in texts if of_device.pytest_ignore_collect(file)]
    assert ignored == ["test_host.py"]
    assert not any(of_host.pytest_ignore_collect(file) for file in texts)
