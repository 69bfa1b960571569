"""Tickets are bounded, a payload is taken once, and a ticket that is not outstanding is refused."""

from __future__ import annotations

import numpy as np
import pytest

from sglcore.step.tickets import Tickets, check_hidden_states, take_payload
from sglcore.worker.schedule_batch import CaptureHiddenMode
from tests.schedule.fake_worker import make_limits
from tests.step.batches import make_batch


def test_a_ticket_that_was_dropped_or_collected_makes_room() -> None:
    tickets = Tickets(2)
    first, second = tickets.issue(1, "one"), tickets.issue(2, "two")
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        tickets.check_room()
    assert take_payload(first, str) == "one"
    tickets.check_room()
    third = tickets.issue(3, "three")
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        tickets.check_room()
    del third
    tickets.check_room()
    assert second.payload == "two"


def test_a_payload_is_taken_once() -> None:
    ticket = Tickets().issue(4, "payload")
    take_payload(ticket, str)
    with pytest.raises(ValueError, match="step 4 was collected before"):
        take_payload(ticket, str)


BARE = make_limits(hidden_size=0, gives_norm_inputs=False)
GIVING = make_limits(hidden_size=8, gives_norm_inputs=True)


@pytest.mark.parametrize(
    ("asked", "value"), [("capture_hidden_mode", CaptureHiddenMode.LAST), ("return_hidden_states_before_norm", True)]
)
def test_hidden_states_that_a_worker_does_not_return_are_refused_and_the_request_for_them_stays(
    asked: str, value: object
) -> None:
    batch = make_batch({1: [2]})
    check_hidden_states(batch, BARE)
    getattr(batch, asked).put(value)
    with pytest.raises(ValueError, match="requests hidden states"):
        check_hidden_states(batch, BARE)
    assert getattr(batch, asked).is_set
    batch.hidden_modes = np.array([1], np.int32)
    check_hidden_states(batch, GIVING)


def test_hidden_states_of_no_row_are_refused() -> None:
    batch = make_batch({1: [2]})
    batch.capture_hidden_mode.put(CaptureHiddenMode.FULL)
    with pytest.raises(ValueError, match="of no row; wanted hidden_modes"):
        check_hidden_states(batch, GIVING)
