"""The worker contract on MLX: takes host data, returns a ticket, gives host results at collect. No
torch, no streams."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future

import mlx.core as mx
import numpy as np

from sglcore.step.tickets import check_hidden_states, take_payload
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.stepper import Launched, Stepper
from sglcore_mlx.thread import StreamThread


class MlxWorker:
    """The worker of one stepper, for generation and embedding: `submit` posts a step to the thread
    that queues all its work, `collect` returns the results. One scheduler owns it."""

    def __init__(
        self, stepper: Stepper, thread: StreamThread, limits: Limits, at_close: Callable[[], None] = lambda: None
    ) -> None:
        """`at_close` is called once, after the thread has ended; other workers may use it too. A
        worker that is garbage collected, or alive when the interpreter ends, is closed then: MLX
        must not run while Python shuts down."""
        self._end = weakref.finalize(self, _end, stepper, thread, at_close)
        self._stepper: Stepper | None = stepper
        self._health = stepper.health
        self._thread = thread
        self._limits = limits

    @property
    def limits(self) -> Limits:
        """The limits of this worker, which never change."""
        return self._limits

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Post a step to the thread that builds and starts it; does not wait. The worker keeps
        `batch`.

        Raises RuntimeError if closed, and ValueError for a batch that wants hidden states which
        this worker does not return.
        Exceptions while building or starting the step are raised by `collect`.
        """
        if self._stepper is None:
            raise RuntimeError("this worker is closed; start another")
        check_hidden_states(batch, self._limits)
        return Ticket(batch.step, self._post(self._stepper, batch))

    def _post(self, stepper: Stepper, batch: ScheduleBatch) -> Future[Launched]:
        return self._thread.post(stepper.launch, batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step and return its results; a ticket is collected once. Raises the step's
        exceptions."""
        output, ended = take_payload(ticket, Future).result()
        if self._stepper is not None and not ended.done():
            self._thread.post(self._stepper.finish, ended)
        ended.result()
        self._health.check()
        return output.read(ticket.step, [np.array(each) for each in output.arrays()])

    def close(self) -> None:
        """Wait for the device, and release weights and KV cache. A second call does nothing;
        `submit` raises RuntimeError afterwards."""
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
        if thread.has_ended:
            at_close()
