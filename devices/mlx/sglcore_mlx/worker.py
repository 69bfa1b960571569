"""The worker contract on MLX: host data in, a ticket out, host results at collect. No torch, no
streams to order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future

import mlx.core as mx
import numpy as np

from sglcore.device.batch import ScheduleBatch
from sglcore.device.worker import BatchResult, Limits, Ticket
from sglcore.step.tickets import refuse_hidden_states, take_payload
from sglcore_mlx.stepper import Launched, Stepper
from sglcore_mlx.thread import StreamThread


class MlxWorker:
    """Generation and embedding on one stepper, all of whose work is queued on one thread. One
    scheduler owns it."""

    def __init__(
        self, stepper: Stepper, thread: StreamThread, limits: Limits, at_close: Callable[[], None] = lambda: None
    ) -> None:
        """`at_close` is called once, when everything has ended. A worker that is dropped, or alive
        when the interpreter ends, is closed then: MLX must not be at work while Python goes
        away."""
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
        """Hand a step to the thread that builds and starts it; does not wait. The worker keeps
        `batch`.

        Raises RuntimeError once closed, and ValueError for what this worker can not hand back. What
        building or starting a step raises comes out of its `collect`.
        """
        if self._stepper is None:
            raise RuntimeError("this worker is closed; start another")
        refuse_hidden_states(batch)
        return Ticket(batch.step, self._post(self._stepper, batch))

    def _post(self, stepper: Stepper, batch: ScheduleBatch) -> Future[Launched]:
        return self._thread.post(stepper.launch, batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step and give its results; a ticket is collected once. Raises what the step
        raised."""
        output, ended = take_payload(ticket, Future).result()
        if self._stepper is not None and not ended.done():
            self._thread.post(self._stepper.finish, ended)
        ended.result()
        self._health.check()
        return output.read(ticket.step, [np.array(each) for each in output.arrays()])

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
