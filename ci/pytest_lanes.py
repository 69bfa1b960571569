"""The pytest side of a lane: tests that it can not run are left out with the capability they miss, and it is recorded
what ran. A test says what it needs with `@pytest.mark.needs("streams")`, never which device.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ci.lanes import HOST, ROOT, Lane, lane_named, lanes, needs_of

DEVICE = "LANE_DEVICE"
"""The environment variable in which a test finds the name of the lane's device."""


def add_options(parser: pytest.Parser) -> None:
    """`--lane` and `--lane-record`."""
    group = parser.getgroup("lanes")
    group.addoption("--lane", default="", help="the lane of devices/*/ci.toml to run as; left out, the host's")
    group.addoption("--lane-record", default="", help="write what ran on the lane to this file")


class LaneRun:
    """One run of pytest on one lane: selects, and keeps what happened to each test."""

    def __init__(self, lane: Lane, record: str) -> None:
        self.lane = lane
        self._record = Path(record) if record else None
        self._tests: dict[str, dict[str, Any]] = {}
        self._left_out: dict[str, list[str]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what the lane can not run."""
        kept, left = [], []
        for item in items:
            marks = [str(name) for mark in item.iter_markers("needs") for name in mark.args]
            needs = needs_of(item.path.relative_to(ROOT), frozenset(marks))
            missing = self.lane.missing(needs)
            (left if missing else kept).append(item)
            if missing:
                self._left_out[item.nodeid] = missing
        items[:] = kept
        if left:
            config.hook.pytest_deselected(items=left)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome, and the reason of a skip."""
        if report.when == "call" or report.outcome != "passed":
            known = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
            known["seconds"] = round(known["seconds"] + report.duration, 3)
            if report.outcome != "passed":
                known["outcome"] = report.outcome
            if report.skipped and isinstance(report.longrepr, tuple):
                known["reason"] = report.longrepr[2].removeprefix("Skipped: ")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker hands over what it left out; the others write the record."""
        handed = getattr(session.config, "workeroutput", None)  # foreign: pytest-xdist's attribute of a worker
        if handed is not None:
            handed["left_out"] = self._left_out
        elif self._record is not None:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            values = {"lane": self.lane.name, "at": int(time.time()), "tests": self._tests, "left_out": self._left_out}
            self._record.write_text(json.dumps(values, indent=1, sort_keys=True))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """What a worker left out."""
        handed = getattr(node, "workeroutput", {})  # foreign: pytest-xdist's attribute of a node
        self._left_out.update(handed.get("left_out", {}))


def configure(config: pytest.Config) -> None:
    """Take up the lane: its device in the environment, its selection and its record."""
    config.addinivalue_line("markers", "needs(*capabilities): what a lane must offer to run this test")
    found = lanes()
    name = config.getoption("--lane")
    lane = lane_named(name, found) if name else next(lane for lane in found if HOST in lane.capabilities)
    os.environ[DEVICE] = lane.device
    config.pluginmanager.register(LaneRun(lane, str(config.getoption("--lane-record") or "")), "lane")


def current_lane(config: pytest.Config) -> Iterator[Lane]:
    """The lane of this run."""
    run = config.pluginmanager.get_plugin("lane")
    assert isinstance(run, LaneRun)
    yield run.lane
