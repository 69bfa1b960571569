"""The rows of a step that emit a token, and the row of each token. Host data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sglcore.worker.schedule_batch import Ints, ScheduleBatch, offsets_of

Array = TypeVar("Array", bound=NDArray)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of a step that emit a token, as `plan_rows` finds them: `emitting` int64[N], their
    numbers (None: all B rows), and the `token_offsets` int32[B + 1] of the results: the tokens of
    row i are `token_offsets[i]` to `token_offsets[i + 1]`, exclusive.
    """

    batch_size: int
    emitting: NDArray[np.int64] | None
    token_offsets: Ints

    @staticmethod
    def silent() -> RowPlan:
        """Return the plan of a step of no rows, without results."""
        return RowPlan(0, None, np.zeros(1, dtype=np.int32))

    @staticmethod
    def each(size: int) -> RowPlan:
        """Return the plan of a step of `size` rows in which every row emits one token."""
        return RowPlan(size, None, np.arange(size + 1, dtype=np.int32))

    def select(self, values: Array) -> Array:
        """Return the values [N, ...] of the emitting rows, from values [B, ...]; `values` itself if
        all rows emit."""
        return values if self.emitting is None else values[self.emitting]  # pyright: ignore[reportReturnType]

    def places(self, rows: Ints) -> Ints:
        """Return int32[M]: the index of rows int32[M] among the emitting rows. They must emit and
        be ascending.
        """
        return rows if self.emitting is None else np.searchsorted(self.emitting, rows).astype(np.int32)

    def scatter_bad(self, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return bool[B] from the flags bool[N] of the emitting rows; False for rows that do not
        emit.
        """
        if self.emitting is None:
            return bad
        every = np.zeros(self.batch_size, dtype=bool)
        every[self.emitting] = bad
        return every


def plan_rows(batch: ScheduleBatch) -> RowPlan:
    """Return the plan of the rows of a batch that emit: every row of a decode step, otherwise those
    with `ScheduleBatch.emits`. Host work only."""
    if batch.forward_mode.is_decode:
        return RowPlan(batch.batch_size, None, batch.token_offsets)
    return RowPlan(batch.batch_size, np.flatnonzero(batch.emits), offsets_of(batch.emits))


def last_tokens(batch: ScheduleBatch, rows: RowPlan) -> Ints:
    """Return int32[N]: for each emitting row, the index of its last token among all T tokens of the
    step."""
    return rows.select(batch.token_offsets[1:]) - np.int32(1)


def owners(offsets: Ints) -> Ints:
    """Return int32[T]: the row of each of the T elements that offsets int32[B + 1] divide among B
    rows.
    """
    return np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))


def within(offsets: Ints) -> Ints:
    """Return int32[T]: the index within its row of each of the T elements that offsets int32[B + 1]
    divide among B rows.
    """
    return np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], np.diff(offsets))
