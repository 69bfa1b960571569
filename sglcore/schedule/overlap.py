"""Steps in flight: an isolated batch for each, and what its ticket still needs until exactly its collect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sglcore.device.batch import ScheduleBatch
from sglcore.device.worker import Ticket
from sglcore.schedule.request import Request


@dataclass(slots=True)
class BatchRecord:
    """One step between its planning and its collect.

    `requests` row for row; the last `len(spans)` rows are chunks over tokens start..end-1. `slots` int32: of the rows
    that emit a token. `finishing` emit their last token in this step. `released` gave up their slot and pages while this
    step was the last to name them: both go back at its collect. `has_stale_rows`: since the step was planned, some
    row's request ended or was retracted. `is_masked`: some row emits under a grammar, so that its next mask needs what this
    step brings. `layers`: the interval of them that this step runs, over `sliced_tokens`, where prompts come by slices; `is_partial`: it
    is not the last slice, and brings nothing. `seconds` it took to submit and to collect, so far;
    `ended`: when it was collected, by the same clock.
    """

    step: int
    requests: list[Request]
    slots: NDArray[np.int32]
    spans: list[tuple[int, int]] = field(default_factory=list)
    finishing: list[Request] = field(default_factory=list)
    released: list[Request] = field(default_factory=list)
    has_stale_rows: bool = False
    is_masked: bool = False
    layers: tuple[int, int] | None = None
    sliced_tokens: int = 0
    is_partial: bool = False
    seconds: float | None = None
    ended: float = 0.0
    batch: ScheduleBatch | None = None
    ticket: Ticket | None = None

    def add_finishing(self, request: Request) -> None:
        """This step emits the request's last token, and its slot and pages go back when it is collected."""
        request.leaving = True
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
        """The step planned last."""
        return self._records[-1]

    def open(self, record: BatchRecord) -> None:
        """A step has been planned."""
        self._records.append(record)

    def close(self, record: BatchRecord) -> None:
        """A step was collected or dropped: forget batch and ticket. Steps close in the order of their planning."""
        if not self._records or self._records[0] is not record:
            open_steps = [other.step for other in self._records]
            raise ValueError(
                f"step {record.step} is not the oldest in flight {open_steps}; collect in order, once each"
            )
        self._records.popleft()
        record.batch = record.ticket = None

    def mark_stale(self) -> None:
        """Some request ended or was retracted: look at each row of what is in flight when it comes."""
        for record in self._records:
            record.has_stale_rows = True

    @property
    def newest_slice(self) -> BatchRecord | None:
        """The step planned last that is not the last slice of a prompt."""
        return next((record for record in reversed(self._records) if record.is_partial), None)

    def naming(self, step: int) -> BatchRecord | None:
        """The record of a step, if it is still in flight."""
        return next((record for record in self._records if record.step == step), None)


@contextmanager
def overlap_forward_isolation(batch: ScheduleBatch) -> Iterator[ScheduleBatch]:
    """Yield a copy of `batch` that one forward may keep and change; if the forward fails, its one-shots come back."""
    view = batch.copy_for_forward()
    try:
        yield view
    except BaseException:
        batch.take_back(view)
        raise


def record_batch_in_overlap(in_flight: InFlight, view: ScheduleBatch, ticket: Ticket) -> BatchRecord:
    """Keep what the ticket still needs (the isolated batch, requests, slots and pages to release) until its collect."""
    record = in_flight.newest
    if record.step != view.step or record.ticket is not None:
        raise ValueError(f"step {view.step} was submitted; wanted the step planned last, {record.step}, once")
    record.batch, record.ticket = view, ticket
    return record
