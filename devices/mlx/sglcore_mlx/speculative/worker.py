"""The worker with speculation: chooses the number of draft tokens per step by acceptance and step
times."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from sglcore.step.draft_length import LengthController, Started, StepTimes
from sglcore.worker.model_worker import BatchResult, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.speculative.stepper import Counts, SpeculativeStepper
from sglcore_mlx.stepper import Launched, Stepper
from sglcore_mlx.worker import MlxWorker


class SpeculativeWorker(MlxWorker):
    """A worker with a stepper that verifies draft tokens; `length` chooses their number for each
    step by acceptance and step times."""

    def __init__(self, *given: Any, lengths: tuple[int, ...]) -> None:
        """`given`: the arguments of `MlxWorker`. `lengths`: the allowed numbers of draft tokens per
        step, ascending."""
        super().__init__(*given)
        self.length = LengthController(lengths)
        self._times = StepTimes()

    def _post(self, stepper: Stepper, batch: ScheduleBatch) -> Future[Launched]:
        assert isinstance(stepper, SpeculativeStepper)
        begin, verified = time.perf_counter(), self.length.tokens
        if batch.forward_mode.is_decode:
            self.length.choose(batch.batch_size)
            is_steady = self.length.tokens == verified
            self._times.begin(Started(batch.step, batch.batch_size, verified, begin, is_steady))
        return self._thread.post(stepper.launch_with, Counts(verified, self.length.tokens), batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        """Return the step's result as `MlxWorker.collect` does (it waits), and report acceptance
        and time to the length controller."""
        result = super().collect(ticket)
        self._times.end(result, self.length)
        return result
