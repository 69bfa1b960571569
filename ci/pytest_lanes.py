"""The pytest plugin of a lane: deselects tests that the lane can not run (with the missing
capability) and tests that this run does not take (with the reason), and records what ran. A test
declares capabilities with `@pytest.mark.needs("streams")`, never a device.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ci.impact import is_due
from ci.lanes import HOST, ROOT, Lane, lane_named, lanes, needs_of
from ci.selection import Selection, Wanted

DEVICE = "LANE_DEVICE"
"""The environment variable that gives tests the name of the lane's device."""


def add_options(parser: pytest.Parser) -> None:
    """Add the options that name a lane and select its tests."""
    group = parser.getgroup("lanes")
    group.addoption("--lane", default="", help="the lane of devices/*/ci.toml to run as; default: the host's")
    group.addoption("--lane-record", default="", help="write what ran on the lane to this file")
    group.addoption("--turn", type=int, help="the number in the rotation; default: run everything")
    group.addoption("--turns", type=int, default=1, help="number of parts of the slow tests to run at once")
    group.addoption(
        "--whole", action="store_true", help="run slow tests and groups whole; lanes divide tests by the turn"
    )
    group.addoption("--fresh", help="groups with unchanged files, separated by commas; default: compare the digests")
    group.addoption("--near", default="", help="a file with the slow tests that run changed code, one per line")
    group.addoption("--group", default="", help="run only the tests of this group, all of them")
    group.addoption("--impact", default="", help="a folder for the record of the lines that each test runs")
    group.addoption("--impact-part", default="", help="record only this part of the tests")


EVERY = 60.0
"""Seconds between two writes of the record while tests run."""
PROCESSOR = "processor"
"""The property of a report that holds the CPU seconds of a test."""
SESSION = "session"
"""The property that holds the seconds of session-scoped fixtures; they are not counted as a cost of
the file that first uses them."""


class LaneRun:
    """One run of pytest on one lane: selects the tests and records their outcomes."""

    def __init__(self, lane: Lane, selection: Selection, record: str) -> None:
        self.lane = lane
        self.selection = selection
        self._record = Path(record) if record else None
        self._covered = selection.covered() if record else {}
        self._tests: dict[str, dict[str, Any]] = {}
        self._left_out: dict[str, list[str]] = {}
        self._not_taken: dict[str, str] = {}
        self._modules = 0
        self._item: pytest.Item | None = None
        self._fixtures: dict[str, float] = {}
        self._due = time.monotonic() + EVERY

    @pytest.hookimpl(tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Skip, except on the host's lane, files of `tests/` that have no `needs(` in them or in a
        conftest.py above them: their tests run on the host only, so they are not imported."""
        is_shared = collection_path.is_relative_to(ROOT / "tests") and collection_path.name.startswith("test_")
        if HOST in self.lane.capabilities or not is_shared or not collection_path.is_file():
            return None
        folders = (folder for folder in collection_path.parents if folder.is_relative_to(ROOT / "tests"))
        files = (collection_path, *(folder / "conftest.py" for folder in folders))
        return None if any("needs(" in file.read_text() for file in files if file.is_file()) else True

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Disable the garbage collector while tests are collected."""
        gc.disable()
        try:
            return (yield)
        finally:
            gc.enable()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Freeze imported modules (`gc.freeze`). Otherwise collecting garbage among thousands of
        tests and all of torch would be most of the cost of a graph capture."""
        self._item = item
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            gc.collect()
            gc.freeze()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect tests that the lane can not run or that this run does not take."""
        kept, left = [], []
        for item in items:
            marks = [str(name) for mark in item.iter_markers("needs") for name in mark.args]
            needs = needs_of(item.path.relative_to(ROOT), frozenset(marks))
            missing = self.lane.missing(needs)
            (left if missing else kept).append(item)
            if missing:
                self._left_out[item.nodeid] = missing
        self._not_taken = self.selection.left_out(kept)
        left += [item for item in kept if item.nodeid in self._not_taken]
        items[:] = [item for item in kept if item.nodeid not in self._not_taken]
        if left:
            config.hook.pytest_deselected(items=left)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure the CPU seconds of a test, including child processes that it waited for."""
        before = _processor()
        try:
            return (yield)
        finally:
            item.user_properties.append((PROCESSOR, round(_processor() - before, 3)))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Measure the set-up seconds of session-scoped fixtures."""
        start = time.monotonic()
        try:
            return (yield)
        finally:
            if fixturedef.scope == SESSION and self._item is not None:
                self._item.user_properties.append((SESSION, time.monotonic() - start))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the outcome and seconds of a test, its file's fixture seconds, and the reason of a
        skip. Writes the record every EVERY seconds."""
        if report.when != "call":
            file = report.nodeid.partition("::")[0]
            shared = _of_session(report) if report.when == "setup" else 0.0
            own = max(0.0, report.duration - shared)
            self._fixtures[file] = round(self._fixtures.get(file, 0.0) + own, 3)
        if report.when == "call" or report.outcome != "passed":
            known = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
            known["seconds"] = round(known["seconds"] + report.duration, 3)
            known["processor"] = dict(report.user_properties).get(PROCESSOR, 0.0)
            if report.outcome != "passed":
                known["outcome"] = report.outcome
            if report.skipped and isinstance(report.longrepr, tuple):
                known["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        if self._record is not None and time.monotonic() > self._due:
            self._write({})
            self._due = time.monotonic() + EVERY

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """In an xdist worker: send the deselected tests to the controller. Otherwise write the
        record."""
        handed = getattr(session.config, "workeroutput", None)  # foreign: pytest-xdist's attribute of a worker
        if handed is not None:
            handed |= {"left_out": self._left_out, "not_taken": self._not_taken}
        elif self._record is not None:
            self._write(self._covered if took_all(self.lane, session.config, exitstatus) else {})

    def _write(self, whole: dict[str, str]) -> None:
        """Write the record. If the run is killed, the previous write remains."""
        assert self._record is not None
        values = {
            "lane": self.lane.name,
            "at": int(time.time()),
            "tests": self._tests,
            "fixtures": self._fixtures,
            "left_out": self._left_out,
            "not_taken": self._not_taken,
            "whole": whole,
            "sampled": self.selection.sampled,
        }
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps(values, indent=1, sort_keys=True))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """If the lane could run none of the tests, print which lanes can."""
        if self._tests or not self._left_out:
            return
        needs = sorted({name for missing in self._left_out.values() for name in missing})
        able = [lane.name for lane in lanes() if not lane.needs_hardware and lane.capabilities.issuperset(needs)]
        where = (
            f"run them on {' or '.join(able)}: python -m ci run {able[0]} --tests FILE"
            if able
            else "no lane here offers it"
        )
        terminalreporter.write_line(
            f"{len(self._left_out)} tests need {', '.join(needs)}, which lane {self.lane.name} does not offer; {where}"
        )

    def pytest_unconfigure(self) -> None:
        """Undo `gc.freeze`: some libraries report objects that Python does not collect at exit."""
        gc.unfreeze()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over the tests that an xdist worker deselected."""
        handed = getattr(node, "workeroutput", {})  # foreign: pytest-xdist's attribute of a node
        self._left_out.update(handed.get("left_out", {}))
        self._not_taken.update(handed.get("not_taken", {}))


def _of_session(report: pytest.TestReport) -> float:
    """Seconds of session-scoped fixtures that were set up within a test's setup."""
    return sum(float(str(value)) for name, value in report.user_properties if name == SESSION)


def _processor() -> float:
    """CPU seconds so far of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def took_all(lane: Lane, config: pytest.Config, exitstatus: int) -> bool:
    """Return whether a run completed and no option restricted it to some of the lane's tests; only
    then may the digests of its groups be renewed."""
    asked = config.option
    has_ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not asked.maxfail
    is_narrowed = asked.keyword or asked.markexpr or asked.deselect
    return has_ended and not is_narrowed and set(lane.tests) <= set(config.args)


def configure(config: pytest.Config) -> None:
    """Set up the lane: export its device, and register its plugin (selection and record) and, with
    `--impact`, the watcher."""
    config.addinivalue_line("markers", "needs(*capabilities): what a lane must offer to run this test")
    found = lanes()
    name = config.getoption("--lane")
    lane = lane_named(name, found) if name else next(lane for lane in found if HOST in lane.capabilities)
    os.environ[DEVICE] = lane.device
    told = config.getoption("--fresh")
    fresh = None if told is None else frozenset(str(told).split(","))
    wanted = Wanted(
        turn=config.getoption("--turn"),
        turns=int(config.getoption("--turns") or 1),
        is_whole=bool(config.getoption("--whole")),
        only=str(config.getoption("--group")),
        fresh=fresh,
        near=frozenset(_lines(config, "--near")),
    )
    selection = Selection(lane, wanted)
    is_worker = hasattr(config, "workerinput")  # foreign: pytest-xdist's attribute of a worker, which writes no record
    record = "" if is_worker else str(config.getoption("--lane-record") or "")
    config.pluginmanager.register(LaneRun(lane, selection, record), "lane")
    watched = str(config.getoption("--impact"))
    if watched and not _only_controls(config):
        from ci.watch import Watcher

        part = str(config.getoption("--impact-part"))
        due = partial(is_due, part=int(part)) if part else lambda test: True
        config.pluginmanager.register(Watcher(Path(watched), due), "impact")


def _lines(config: pytest.Config, option: str) -> list[str]:
    """Return the lines of the file that an option names; none if the option is not given."""
    name = str(config.getoption(option))
    return Path(name).read_text().splitlines() if name else []


def _only_controls(config: pytest.Config) -> bool:
    """Return whether this process runs no tests itself, because xdist workers do."""
    is_worker = hasattr(config, "workerinput")  # foreign: pytest-xdist's attribute of a worker
    return not is_worker and bool(config.getoption("numprocesses", 0))


def run_of(config: pytest.Config) -> LaneRun:
    """Return the `LaneRun` plugin of this run."""
    run = config.pluginmanager.get_plugin("lane")
    assert isinstance(run, LaneRun)
    return run
