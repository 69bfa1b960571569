"""A worker that counts steps and the part of their time in which the host was not free."""

from __future__ import annotations

from typing import Any

import pytest

from sglcore.engine.metered_worker import Meter
from tests.schedule.fake_worker import FakeWorker, make_limits


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_a_device_that_runs_beside_the_host_takes_the_time_that_it_is_waited_for(runs_ahead: bool) -> None:
    """If the host is the device itself, submitting counts as device time too."""
    meter = Meter(FakeWorker(make_limits(runs_ahead=runs_ahead)))
    meter.submit_seconds, meter.wait_seconds = 4.0, 2.0
    assert meter.device_seconds == (2.0 if runs_ahead else 6.0)


def test_steps_are_counted_by_their_path_and_timed_on_both_sides() -> None:
    class Worker:
        limits: Any = make_limits()

        def submit(self, batch: Any) -> Any:
            return batch

        def collect(self, ticket: Any) -> Any:
            return ticket

    class Result:
        swaps = None

        def __init__(self, path: str) -> None:
            self.path = path

    worker: Any = Worker()
    meter = Meter(worker)
    for path in ("eager", "full", "eager"):
        step: Any = Result(path)
        assert meter.collect(meter.submit(step)) is step
    assert meter.paths == {"eager": 2, "full": 1}
    assert meter.submit_seconds > 0 and meter.wait_seconds > 0
