"""The copies of a step between request states and snapshots, for workers of every tensor library.

Row 0 of the states belongs to padding and rows 1..max_requests to the request slots; snapshot n is
row max_requests + n.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglcore.worker.schedule_batch import ScheduleBatch

Ints = NDArray[np.int32]


def state_moves(batch: ScheduleBatch, max_requests: int) -> dict[str, Ints]:
    """Return the row numbers int32[N] of the state table that a step copies, by name; empty ones
    are left out.

    Before the forward: `state_zeroed`, and `state_restored` from `state_sources`. After it:
    `state_kept` to `state_copies`. A steady decode step has none.
    """
    moves: dict[str, Ints] = {}
    if batch.state_from is not None:
        moves["state_zeroed"] = batch.slots[batch.state_from == 0]
        restored = batch.state_from > 0
        moves["state_restored"] = batch.slots[restored]
        moves["state_sources"] = batch.state_from[restored] + np.int32(max_requests)
    if batch.state_to is not None:
        kept = batch.state_to > 0
        moves["state_kept"] = batch.slots[kept]
        moves["state_copies"] = batch.state_to[kept] + np.int32(max_requests)
    return {name: rows for name, rows in moves.items() if len(rows)}


def entering_slots(batch: ScheduleBatch) -> Ints:
    """Return the request slots int32[N] that this step assigns to a new request: the device has no
    page of them yet.
    """
    return batch.slots[batch.page_counts == 0]
