"""The entries of the kernel table for rows of which the device has a few and the host all."""

from __future__ import annotations

from sglcore.runtime.kernels import reference_hisparse
from sglcore.runtime.kernels.entry import entry

REACHING = ("norm_rope_store", "copy_rows")
"""Entries that read or write host memory where rows lie there."""


class HiSparseKernels:
    """A request's entries are counted from 0; K are chosen for it, and D are held on the device, K <= D. All tables are int32, by slot;
    slot 0 is padding's. Row 0 of a pool is nobody's."""

    swap_in = entry(reference_hisparse.swap_in, writes=("held", "order", "where", "rows", "loads", "counts"))
    """`swap_in(chosen int32 [B, K], slots int32 [B], table int32 [S, P], rows_per_page, held int32 [S, D], order int32 [S, D], where
    int32 [S, E + 1], rows int32 [B, K], loads int32 [2, B, K], counts int32 [B])`.

    `chosen` are distinct entries, -1 behind the last. `held` is the entry in each place (-1: none), `order` has all places, the one
    used longest ago first, and `where` the place of an entry that is held; of any other it may say anything. Each slot occurs
    once, but for 0, whose rows choose nothing and change nothing.

    An entry that is not held takes, in the order of `chosen`, the first place of `order` that none of this step's has. Then
    `order` is: what was not used, then what was taken, both in the order before; then what was held already. `rows` are
    slot * D + place, -1 where nothing is chosen. The first counts[b] of loads[0, b] are rows of the pool of all, which has
    `rows_per_page` for each page of `table`; of loads[1, b] rows of the device's. -1 behind them.
    """
    copy_rows = entry(reference_hisparse.copy_rows, writes=("target",))
    """`copy_rows(source [N, D], target [M, D], loads int32 [2, B, K], counts int32 [B])`: target[loads[1, b, i]] =
    source[loads[0, b, i]] for i below counts[b], bit for bit. One of both may lie in pinned host memory, where the facts say that
    kernels reach it."""
