"""What a batch adds to a worker's tables by request slot: pages, and tokens if sampling needs the
history.
"""

from __future__ import annotations

import numpy as np

from sglcore.step.emitting_rows import within
from sglcore.worker.schedule_batch import Ints, ScheduleBatch

Entries = tuple[Ints, Ints, Ints]
"""Request slots, columns and the values to write there, int32[N] each."""


def new_pages(batch: ScheduleBatch) -> Entries | None:
    """Return the page-table entries for the new pages of a batch, one per page, in the columns
    after those that the row's slot has; None if there are none.
    """
    if not len(batch.new_pages):
        return None
    counts = np.diff(batch.new_page_offsets)
    columns = np.repeat(batch.page_counts, counts) + within(batch.new_page_offsets)
    return np.repeat(batch.slots, counts), columns, batch.new_pages


def new_window_pages(batch: ScheduleBatch) -> Entries | None:
    """Return the table entries for sliding-window pages: for each row with a changed list, its
    whole new list, in columns 0.. of the row's slot. One entry per page. None if no list changed.
    """
    if batch.window_pages is None or batch.window_offsets is None or not len(batch.window_pages):
        return None
    return np.repeat(batch.slots, np.diff(batch.window_offsets)), within(batch.window_offsets), batch.window_pages


def new_history(batch: ScheduleBatch) -> Entries | None:
    """Return the token-table entries for rows that entered a request slot and need their history:
    all known tokens of each, in columns 0.. of its slot. None if the batch has no history.
    """
    if batch.history_ids is None or batch.history_offsets is None:
        return None
    return np.repeat(batch.slots, np.diff(batch.history_offsets)), within(batch.history_offsets), batch.history_ids
