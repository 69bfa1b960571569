"""States of recurrent layers: pools by request slot and snapshot, and the rows that steps compute
with.

A step takes rows from the pools and leaves new rows. These are written back when a later step needs
other rows; nothing reads the pools by then, so MLX writes in place. While the same requests decode,
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore.step.snapshot_copies import entering_slots, state_moves
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.forward_batch import States
from sglcore_mlx.models.contract import StateShape

Ints: TypeAlias = NDArray[np.signedinteger[Any]]
NONE = np.frombuffer(b"", dtype=np.int32)


def state_bytes(layers: Sequence[Sequence[StateShape]]) -> int:
    """Return the bytes of one request's state over all layers."""
    return sum(prod(each.shape) * each.dtype.size for layer in layers for each in layer)


@dataclass(frozen=True, slots=True)
class _Left:
    """The states after a step, by layer, with the rows of request slots `slots` int32 [N]; 0 is
    padding. The rows numbered `kept` are also to be copied to the pools' rows `copies` (snapshots).
    Empty arrays: nothing was left."""

    states: list[States]
    slots: Ints
    kept: Ints
    copies: Ints


class StatePool:
    """A pool [1 + max_requests + num_snapshots, *shape] for each array of each layer: row s is
    request slot s, row max_requests + n is snapshot n. Row 0 is zeros: requests begin with it, and
    padding reads it."""

    def __init__(
        self, layers: Sequence[Sequence[StateShape]], max_requests: int, num_snapshots: int, poison: bool = False
    ) -> None:
        """Allocates; waits. `poison`: unwritten rows are NaN, and the slot of a new request reads
        as NaN unless it is zeroed or restored, so that a missing move shows."""
        self._max_requests, self._rows, self._poison = max_requests, 1 + max_requests + num_snapshots, poison
        self._pools = [[self._make(each) for each in layer] for layer in layers]
        self._left = _Left([], NONE, NONE, NONE)
        mx.eval(self.arrays())

    def take(self, batch: ScheduleBatch, rows: int) -> list[States]:
        """Return the states of a batch's requests before its tokens, by layer, each array [rows,
        *shape], padded with zeros; empty for a model without states. New requests begin with zeros,
        restored ones with their snapshot. Lazy."""
        if not self._pools:
            return []
        left, sources = self._left, self._sources(batch, rows)
        if np.array_equal(sources, left.slots):
            self._write(left.kept, left.copies)
            return left.states
        self._write_left()
        found = mx.array(sources)
        return [[pool[found] for pool in pools] for pools in self._pools]

    def settle(self) -> None:
        """Write the states that the last step left to the pools. Needed before a step that took its
        rows earlier (layered prefill) leaves its own. Queues only."""
        self._write_left()
        self._left = _Left([], NONE, NONE, NONE)

    def leave(self, batch: ScheduleBatch, states: list[States]) -> None:
        """Keep `states`, the states after the batch's tokens, with rows as `take` returned them;
        they are written to the pools when a later step needs other rows. Snapshots that the batch
        asks for are noted. Lazy."""
        if not self._pools:
            return
        moves, slots = state_moves(batch, self._max_requests), np.zeros(states[0][0].shape[0], dtype=np.int32)
        slots[: batch.batch_size] = batch.slots
        kept = np.flatnonzero(np.isin(batch.slots, moves.get("state_kept", NONE)))
        self._left = _Left(states, slots, kept, moves.get("state_copies", NONE))

    def arrays(self) -> list[mx.array]:
        """Return all arrays that later steps read, so that they can be evaluated."""
        return [array for layer in (*self._pools, *self._left.states) for array in layer]

    def _sources(self, batch: ScheduleBatch, rows: int) -> Ints:
        """Return int32 [rows]: the pools' row from which each request of the batch begins; 0
        (zeros) for padding."""
        moves, of_slot = state_moves(batch, self._max_requests), np.arange(self._max_requests + 1, dtype=np.int32)
        if self._poison:
            of_slot[entering_slots(batch)] = self._rows
        of_slot[moves.get("state_zeroed", NONE)] = 0
        of_slot[moves.get("state_restored", NONE)] = moves.get("state_sources", NONE)
        sources = np.zeros(rows, dtype=np.int32)
        sources[: batch.batch_size] = of_slot[batch.slots]
        return sources

    def _write_left(self) -> None:
        left = self._left
        living = np.flatnonzero(left.slots)
        self._write(np.concatenate((living, left.kept)), np.concatenate((left.slots[living], left.copies)))

    def _write(self, rows: Ints, targets: Ints) -> None:
        """Write the rows `rows` of the states that the last step left to the pools' rows
        `targets`."""
        if not len(rows):
            return
        taken, places = mx.array(rows), mx.array(targets)
        for pools, states in zip(self._pools, self._left.states, strict=True):
            for place, left in enumerate(states):
                pools[place][places] = left[taken]

    def _make(self, each: StateShape) -> mx.array:
        """Allocate and return the pool of one array, zeros or NaN with poison; with poison it has
        one more row, which stays NaN. Row 0 is zeros."""
        fill, rows = (float("nan"), self._rows + 1) if self._poison else (0.0, self._rows)
        pool = mx.full((rows, *each.shape), fill, each.dtype)
        pool[0] = 0
        return pool
