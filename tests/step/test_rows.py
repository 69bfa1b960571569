"""Which rows sample, the index of their tokens, and the row of each token."""

from __future__ import annotations

import numpy as np

from sglcore.step.emitting_rows import last_tokens, owners, plan_rows, within
from sglcore.worker.schedule_batch import ForwardMode
from tests.step.batches import ints, make_batch


def test_of_a_mixed_step_only_the_emitting_rows_are_selected() -> None:
    batch = make_batch({4: [1, 2, 3], 2: [5], 7: [6, 8]}, emits=[False, True, True])
    rows = plan_rows(batch)
    assert rows.token_offsets.tolist() == [0, 0, 1, 2]
    assert rows.select(batch.slots).tolist() == [2, 7]
    assert last_tokens(batch, rows).tolist() == [3, 5]
    assert rows.places(ints([1, 2])).tolist() == [0, 1]
    assert rows.scatter_bad(np.array([True, False])).tolist() == [False, True, False]


def test_of_a_decode_step_every_row_is() -> None:
    batch = make_batch({4: [-4], 2: [-2]}, ForwardMode.DECODE)
    rows = plan_rows(batch)
    assert rows.emitting is None and rows.select(batch.slots) is batch.slots
    assert last_tokens(batch, rows).tolist() == [0, 1]
    assert rows.places(ints([1])).tolist() == [1]
    assert rows.scatter_bad(np.array([False, True])).tolist() == [False, True]


def test_a_step_of_which_no_row_emits_selects_none() -> None:
    batch = make_batch({4: [1, 2], 2: [5]}, emits=[False, False])
    rows = plan_rows(batch)
    assert rows.select(batch.slots).tolist() == last_tokens(batch, rows).tolist() == []


def test_elements_know_their_row_and_their_place_in_it() -> None:
    assert owners(ints([0, 2, 2, 5])).tolist() == [0, 0, 2, 2, 2]
    assert within(ints([0, 2, 2, 5])).tolist() == [0, 1, 0, 1, 2]
    assert owners(ints([0])).tolist() == within(ints([0])).tolist() == []
