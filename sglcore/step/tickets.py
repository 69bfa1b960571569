"""The tickets of a worker: which are in flight, the limit, and the payload, which can be taken
once.
"""

from __future__ import annotations

import weakref
from typing import TypeVar

from sglcore.worker.model_worker import Limits, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch

Payload = TypeVar("Payload")


class Tickets:
    """Tickets of one worker that are in flight. A ticket counts until its payload is taken or the
    ticket object is dropped.
    """

    def __init__(self, most: int | None = None) -> None:
        """Allow at most `most` tickets in flight; None: any number."""
        self._most = most
        self._out: list[weakref.ref[Ticket]] = []

    def check_room(self) -> None:
        """Raise RuntimeError if the maximum number of tickets is in flight. Call it before starting
        a step: `issue` does not check.
        """
        self._out = [ref for ref in self._out if (ticket := ref()) is not None and ticket.payload is not None]
        if self._most is not None and len(self._out) >= self._most:
            raise RuntimeError(f"{self._most} steps are in flight; collect the oldest before submitting another")

    def issue(self, step: int, payload: object) -> Ticket:
        """Make the ticket of a started step, with its `payload` (not None), and count it as in
        flight. Does not check the limit: call `check_room` before starting the step.
        """
        ticket = Ticket(step, payload)
        self._out.append(weakref.ref(ticket))
        return ticket


def take_payload(ticket: Ticket, kind: type[Payload]) -> Payload:
    """Take the payload out of a ticket, which has none afterwards. Raises ValueError if it is not
    of type `kind`, as the second time."""
    payload = ticket.payload
    if not isinstance(payload, kind):
        raise ValueError(f"step {ticket.step} was collected before; a ticket is collected once")
    ticket.payload = None
    return payload


def check_hidden_states(batch: ScheduleBatch, limits: Limits) -> None:
    """Raise ValueError if a batch requests hidden states that a worker with these limits does not
    return, or without the rows that get them.
    """
    if batch.return_hidden_states_before_norm.is_set and not limits.gives_norm_inputs:
        raise ValueError(f"step {batch.step} requests hidden states before the last norm; this worker returns none")
    if not batch.capture_hidden_mode.is_set:
        return
    if not limits.hidden_size:
        raise ValueError(f"step {batch.step} requests hidden states; this worker returns tokens and scores only")
    if batch.hidden_modes is None:
        raise ValueError(f"step {batch.step} requests hidden states of no row; wanted hidden_modes too")
