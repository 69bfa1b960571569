"""The worker contract on MLX: host data in, a ticket out, host results at collect. No torch, no streams to order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from sglcore.device.batch import ScheduleBatch
from sglcore.device.worker import BatchResult, Limits, Ticket
from sglcore.step.rows import RowPlan, plan_rows
from sglcore_mlx.sample_step import host_logprobs
from sglcore_mlx.stepper import Launched, Stepper
from sglcore_mlx.thread import StreamThread


@dataclass(frozen=True, slots=True)
class Pending:
    """What a ticket holds until it is collected."""

    rows: RowPlan
    launched: Future[Launched]


class MlxWorker:
    """Generation and embedding on one stepper, all of whose work is queued on one thread. One scheduler owns it."""

    def __init__(
        self, stepper: Stepper, thread: StreamThread, limits: Limits, at_close: Callable[[], None] = lambda: None
    ) -> None:
        """`at_close` is called once, when everything has ended. A worker that is dropped, or alive when the interpreter
        ends, is closed then: MLX must not be at work while Python goes away."""
        self._end = weakref.finalize(self, _end, stepper, thread, at_close)
        self._stepper: Stepper | None = stepper
        self._health = stepper.health
        self._thread = thread
        self._limits = limits

    @property
    def limits(self) -> Limits:
        """What this worker can hold; constant."""
        return self._limits

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Hand a step to the thread that builds and starts it; does not wait. The worker keeps `batch`.

        Raises RuntimeError once closed, and ValueError for what this worker can not hand back. What building or starting
        a step raises comes out of its `collect`.
        """
        if self._stepper is None:
            raise RuntimeError("this worker is closed; start another")
        if batch.capture_hidden_mode.is_set or batch.return_hidden_states_before_norm.is_set:
            raise ValueError(f"step {batch.step} asks for hidden states; this worker hands back tokens and scores only")
        rows = plan_rows(batch)
        return Ticket(batch.step, Pending(rows, self._thread.post(self._stepper.launch, batch, rows)))

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step and give its results; a ticket is collected once. Raises what the step raised."""
        pending = ticket.payload
        if not isinstance(pending, Pending):
            raise ValueError(f"step {ticket.step} was collected before; a ticket is collected once")
        ticket.payload = None
        launched = pending.launched.result()
        self._health.check()
        try:
            mx.eval(launched.arrays())
        except Exception as error:
            self._health.fail(error)
            raise
        rows = pending.rows
        if launched.sampled is None:
            return _embedded(ticket.step, rows, launched)
        sampled = launched.sampled
        return BatchResult(
            ticket.step,
            rows.token_offsets,
            np.array(sampled.tokens.token_ids),
            rows.scatter_bad(np.array(sampled.tokens.bad_rows)),
            None if sampled.tokens.logprobs is None else host_logprobs(sampled.tokens.logprobs),
            {row: host_logprobs(part) for row, part in sampled.prompt.items()},
            path=launched.path,
        )

    def close(self) -> None:
        """Wait for the device, and let go of weights and cells. Idempotent."""
        self._stepper = None
        self._end()


def _end(stepper: Stepper, thread: StreamThread, at_close: Callable[[], None]) -> None:
    try:
        if thread.is_running:
            thread.post(stepper.close)
        del stepper
        thread.close()
        mx.clear_cache()
    finally:
        at_close()


def _embedded(step: int, rows: RowPlan, launched: Launched) -> BatchResult:
    embeddings = np.array(launched.embeddings)
    bad = np.logical_not(np.isfinite(embeddings).all(axis=1))
    return BatchResult(step, rows.token_offsets, np.zeros(0, np.int32), bad, embeddings=embeddings, path=launched.path)
