"""Kernel table entries for KV rows in host memory with a cache on the device (HiSparse)."""

from __future__ import annotations

from sglcore.runtime.kernels import reference_hisparse
from sglcore.runtime.kernels.entry import entry

REACHING = ("norm_rope_store", "copy_rows")
"""The entries that access host memory if KV rows are there."""


class HiSparseKernels:
    """The part of `KernelTable` for a cache of KV rows on the device. An entry is one KV row of a
    request, numbered from 0.

    K entries of a request are chosen in a step, and D are cached on the device, K <= D. All tables
    are int32, by request slot. Slot 0 is for padding. Row 0 of a pool is reserved.
    """

    swap_in = entry(reference_hisparse.swap_in, writes=("held", "order", "where", "rows", "loads", "counts"))
    """`swap_in(chosen int32 [B, K], slots int32 [B], table int32 [S, P], rows_per_page, held int32
    [S, D], order int32 [S, D], where int32 [S, E + 1], rows int32 [B, K], loads int32 [2, B, K],
    counts int32 [B])`.

    `chosen` are distinct entries, then -1. `held` is the entry in each place (-1: none), `order`
    has all places, least recently used first, and `where` is the place of a held entry (undefined
    for others). Each slot occurs once, except slot 0 (padding): its rows choose nothing and change
    nothing.

    An entry that is not held takes, in the order of `chosen`, the first place of `order` without an
    entry of this step. Afterwards `order` has the unused places, then the newly taken ones, both in
    their previous order, then the places of entries that were held already. `rows` are slot * D +
    place, -1 where nothing is chosen. loads[0, b] has counts[b] rows of the full pool, which has
    `rows_per_page` rows for each page of `table`; loads[1, b] has the corresponding rows of the
    device cache. The rest is -1.
    """
    copy_rows = entry(reference_hisparse.copy_rows, writes=("target",))
    """`copy_rows(source [N, D], target [M, D], loads int32 [2, B, K], counts int32 [B])`.

    target[loads[1, b, i]] = source[loads[0, b, i]] for i below counts[b], bit for bit. Either may
    lie in pinned host memory if the facts say that kernels reach it.
    """
