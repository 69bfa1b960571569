"""The worker of a start with proposals: how many each step verifies, by what was right and what steps took."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

from sglcore.device.batch import ScheduleBatch
from sglcore.device.worker import BatchResult, Ticket
from sglcore.step.draft_length import LengthController
from sglcore_mlx.speculative.stepper import Counts, SpeculativeStepper
from sglcore_mlx.stepper import Launched, Stepper
from sglcore_mlx.worker import MlxWorker


class Started(NamedTuple):
    """A verification of so many proposals of each request, and `time.perf_counter()` when it was submitted. `is_steady`: as many
    are made for the next step."""

    step: int
    requests: int
    tokens: int
    begin: float
    is_steady: bool


class SpeculativeWorker(MlxWorker):
    """As the plain worker, on a stepper that verifies proposals: `length` says of how many."""

    def __init__(self, *given: Any, lengths: tuple[int, ...]) -> None:
        """`given` is the plain worker's. `lengths` are the numbers of proposals that a step may verify, ascending."""
        super().__init__(*given)
        self.length = LengthController(lengths)
        self._started = deque[Started]()
        self._last_collect = 0.0

    def _post(self, stepper: Stepper, batch: ScheduleBatch) -> Future[Launched]:
        assert isinstance(stepper, SpeculativeStepper)
        begin, verified = time.perf_counter(), self.length.tokens
        if batch.forward_mode.is_decode:
            self.length.choose(batch.batch_size)
            is_steady = self.length.tokens == verified
            self._started.append(Started(batch.step, batch.batch_size, verified, begin, is_steady))
        return self._thread.post(stepper.launch_with, Counts(verified, self.length.tokens), batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        """As the plain worker's. What a step took is the time since it was submitted, or since the one before it was collected:
        nothing waits for it."""
        result = super().collect(ticket)
        now, before = time.perf_counter(), self._last_collect
        self._last_collect = now
        while self._started and self._started[0].step <= result.step:
            started = self._started.popleft()
            if started.step == result.step:
                accepted = result.token_offsets[1:] - result.token_offsets[:-1] - 1
                seconds = now - max(before, started.begin) if started.is_steady else None
                self.length.learn(started.requests, started.tokens, accepted, seconds)
        return result
