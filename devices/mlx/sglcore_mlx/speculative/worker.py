"""The worker of a start with proposals: how many each step verifies, by what was right and what
steps took."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from sglcore.device.batch import ScheduleBatch
from sglcore.device.draft_length import LengthController, Started, StepTimes
from sglcore.device.worker import BatchResult, Ticket
from sglcore_mlx.speculative.stepper import Counts, SpeculativeStepper
from sglcore_mlx.stepper import Launched, Stepper
from sglcore_mlx.worker import MlxWorker


class SpeculativeWorker(MlxWorker):
    """As the plain worker, on a stepper that verifies proposals: `length` says of how many."""

    def __init__(self, *given: Any, lengths: tuple[int, ...]) -> None:
        """`given` is the plain worker's. `lengths` are the numbers of proposals that a step may
        verify, ascending."""
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
        """As the plain worker's."""
        result = super().collect(ticket)
        self._times.end(result, self.length)
        return result
