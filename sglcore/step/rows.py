"""Which rows of a step emit a token. Host data only: workers of every kind read results by it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglcore.device.batch import ScheduleBatch


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which rows emit: `emitting` int64[N] (None: all B), and the results' `token_offsets` int32[B + 1]."""

    batch_size: int
    emitting: NDArray[np.int64] | None
    token_offsets: NDArray[np.int32]

    def scatter_bad(self, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[B] from the flags bool[N] of the emitting rows."""
        if self.emitting is None:
            return bad
        every = np.zeros(self.batch_size, dtype=bool)
        every[self.emitting] = bad
        return every


def plan_rows(batch: ScheduleBatch) -> RowPlan:
    """Host work only."""
    if batch.forward_mode.is_decode:
        return RowPlan(batch.batch_size, None, batch.token_offsets)
    offsets = np.zeros(batch.batch_size + 1, dtype=np.int32)
    np.cumsum(batch.emits, out=offsets[1:])
    return RowPlan(batch.batch_size, np.flatnonzero(batch.emits), offsets)
