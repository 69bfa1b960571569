"""Steps in flight: an isolated batch for each step, and the resources that its ticket needs until
its collect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.request import Request
from sglcore.worker.model_worker import Ticket
from sglcore.worker.schedule_batch import ScheduleBatch


@dataclass(slots=True)
class BatchRecord:
    """One step between its planning and its collect. The scheduler makes it: the requests of its
    rows, the chunks, which requests finish or leave with it, and the batch and ticket once it is
    submitted."""

    step: int
    """Number of the step."""
    requests: list[Request]
    """The request of each row. The last `len(spans)` rows are prefill chunks."""
    slots: NDArray[np.int32]
    """int32: the request slots of the rows that sample a token."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """The tokens start..end-1 of each chunk."""
    finishing: list[Request] = field(default_factory=list)
    """Requests that sample their last token in this step."""
    released: list[Request] = field(default_factory=list)
    """Requests that have left and have their last row in this step. Their request slots and pages
    are released when it is collected."""
    has_stale_rows: bool = False
    """The request of some row ended or was preempted after the step was planned."""
    is_masked: bool = False
    """Some row samples under a grammar, so its next mask needs the result of this step."""
    layers: tuple[int, int] | None = None
    """The layers first..end-1 that this step runs, with prompt slices. None: all layers."""
    sliced_tokens: int = 0
    """Number of tokens of the prompt that runs in slices; 0: none."""
    is_partial: bool = False
    """The step is a prompt slice but not the prompt's last one, so it has no result."""
    seconds: float | None = None
    """Seconds spent in submit and collect so far. None: not measured."""
    ended: float = 0.0
    """Time of the collect, by `time.perf_counter`. 0: not collected or not measured."""
    batch: ScheduleBatch | None = None
    """The batch that the worker received. None: not submitted, or collected."""
    ticket: Ticket | None = None
    """The worker's ticket. None: not submitted, or collected."""

    def add_finishing(self, request: Request) -> None:
        """Note that this step emits the request's last token. Its request slot and pages are
        released when the step is collected.
        """
        request.run.leave()
        self.finishing.append(request)
        self.released.append(request)


class InFlight:
    """The records of planned steps, oldest first."""

    def __init__(self) -> None:
        self._records: deque[BatchRecord] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[BatchRecord]:
        return iter(self._records)

    @property
    def newest(self) -> BatchRecord:
        """The last planned step. Raises IndexError if none is in flight."""
        return self._records[-1]

    def open(self, record: BatchRecord) -> None:
        """Add a planned step."""
        self._records.append(record)

    def close(self, record: BatchRecord) -> None:
        """Remove a collected or dropped step and its batch and ticket. Raises ValueError unless it
        is the oldest step in flight.
        """
        if not self._records or self._records[0] is not record:
            open_steps = [other.step for other in self._records]
            raise ValueError(
                f"step {record.step} is not the oldest in flight {open_steps}; collect in order, once each"
            )
        self._records.popleft()
        record.batch = record.ticket = None

    def mark_stale(self) -> None:
        """Mark all steps in flight: a request ended or was preempted, so check each row of their
        results.
        """
        for record in self._records:
            record.has_stale_rows = True

    @property
    def newest_slice(self) -> BatchRecord | None:
        """The last planned step that is a prompt slice but not the prompt's last slice, or None."""
        return next((record for record in reversed(self._records) if record.is_partial), None)

    def naming(self, step: int) -> BatchRecord | None:
        """Return the record of step number `step`, or None if it is not in flight."""
        return next((record for record in self._records if record.step == step), None)


@contextmanager
def overlap_forward_isolation(batch: ScheduleBatch) -> Iterator[ScheduleBatch]:
    """Yield a copy of `batch` that one forward may keep and change. If the forward fails, `batch`
    gets its one-shot values back.
    """
    view = batch.copy_for_forward()
    try:
        yield view
    except BaseException:
        batch.take_back(view)
        raise


def record_batch_in_overlap(in_flight: InFlight, view: ScheduleBatch, ticket: Ticket) -> BatchRecord:
    """Attach the isolated batch and the ticket to the step planned last, until its collect, and
    return its record. Raises ValueError if the batch is of another step or for a second submit, and
    IndexError if no step is in flight."""
    record = in_flight.newest
    if record.step != view.step or record.ticket is not None:
        raise ValueError(f"step {view.step} was submitted; wanted the step planned last, {record.step}, once")
    record.batch, record.ticket = view, ticket
    return record
