"""A worker that counts steps and the part of their time in which the host was not free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.engine import metered_worker
from sglcore.engine.metered_worker import Meter
from sglcore.worker.swap_counts import SwapCounts
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


def test_a_meter_adds_up_and_passes_on_what_its_worker_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a step of the worker moves: 2 s to submit, 0.5 s to collect."""
    clock, closed = [10.0], list[bool]()

    class Worker:
        limits: Any = make_limits()

        def submit(self, batch: Any) -> Any:
            clock[0] += 2.0
            return batch

        def collect(self, ticket: Any) -> Any:
            clock[0] += 0.5
            return ticket

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(metered_worker, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    worker: Any = Worker()
    meter = Meter(worker)
    assert meter.limits is worker.limits
    for swaps in (SwapCounts(5, 4, 3, 2, 1), None, SwapCounts(10, 20, 30, 40, 50)):
        step: Any = SimpleNamespace(path="eager", swaps=swaps)
        meter.collect(meter.submit(step))
        clock[0] += 100.0
    assert (meter.submit_seconds, meter.wait_seconds) == (6.0, 1.5)
    assert meter.swaps == SwapCounts(15, 24, 33, 42, 51)
    assert not closed
    meter.close()
    assert closed == [True]
