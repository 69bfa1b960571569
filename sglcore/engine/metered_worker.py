"""A worker around another worker that measures the host time of steps, and counts the path that
each step took."""

from __future__ import annotations

import time
from collections import Counter

from sglcore.worker.model_worker import BatchResult, Limits, ModelWorker, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore.worker.swap_counts import SwapCounts


class Meter:
    """A `ModelWorker` that passes each call to the given `worker` and measures it. `paths` counts
    collected steps by `BatchResult.path`; `submit_seconds` and `wait_seconds` (in `collect`) are
    sums of host time, and `swaps` the sum of `BatchResult.swaps`."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self.limits: Limits = worker.limits
        self.paths: Counter[str] = Counter()
        self.submit_seconds = 0.0
        self.wait_seconds = 0.0
        self.swaps = SwapCounts()

    @property
    def device_seconds(self) -> float:
        """Seconds in which the host waited for steps, and, if the worker computes in `submit`, the
        seconds of `submit`."""
        return self.wait_seconds if self.limits.runs_ahead else self.wait_seconds + self.submit_seconds

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Implements `ModelWorker.submit`; adds its seconds to `submit_seconds`."""
        begin = time.perf_counter()
        ticket = self._worker.submit(batch)
        self.submit_seconds += time.perf_counter() - begin
        return ticket

    def collect(self, ticket: Ticket) -> BatchResult:
        """Implements `ModelWorker.collect`; adds its seconds to `wait_seconds`, and counts the
        step's path. Waits."""
        begin = time.perf_counter()
        result = self._worker.collect(ticket)
        self.wait_seconds += time.perf_counter() - begin
        self.paths[result.path] += 1
        if result.swaps is not None:
            self.swaps += result.swaps
        return result

    def close(self) -> None:
        """Close the worker."""
        self._worker.close()
