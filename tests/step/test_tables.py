"""A batch's changes to the tables of its slots."""

from __future__ import annotations

from sglcore.step.tables import new_history, new_pages
from tests.step.batches import ints, make_batch


def test_pages_come_after_those_that_a_slot_has() -> None:
    batch = make_batch({4: [1], 2: [5]}, page_counts=ints([3, 0]), new_page_offsets=ints([0, 2, 3]))
    batch.new_pages = ints([10, 11, 12])
    found = new_pages(batch)
    assert found is not None
    assert [part.tolist() for part in found] == [[4, 4, 2], [3, 4, 0], [10, 11, 12]]


def test_history_starts_with_a_slots_first_token() -> None:
    batch = make_batch({4: [1], 2: [5]}, history_offsets=ints([0, 0, 3]), history_ids=ints([7, 8, 5]))
    found = new_history(batch)
    assert found is not None
    assert [part.tolist() for part in found] == [[2, 2, 2], [0, 1, 2], [7, 8, 5]]


def test_a_batch_that_adds_nothing_gives_nothing() -> None:
    batch = make_batch({4: [1]}, new_page_offsets=ints([0, 0]), new_pages=ints([]))
    assert new_pages(batch) is None and new_history(batch) is None
