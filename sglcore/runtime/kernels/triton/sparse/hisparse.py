"""KV rows in host memory: which rows the device cache takes in, and the copies."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.sparse.pool_rows import paged_rows
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles

WORDS = (torch.int32, torch.int16, torch.uint8)
"""The dtypes as which a row is copied: the widest that divides it."""


@triton.jit
def store_loads(line, turn, row, is_miss, lane, missed, K):
    """Store one of the two rows of `loads` of a request, which begins at `line`: `row` of each miss
    at its rank `turn`, then -1.

    `lane` are the places 0, 1, ...; `missed` is the number of misses, K the length of the row.
    """
    tl.store(line + turn, row, mask=is_miss)
    tl.store(line + lane, -1, mask=(lane >= missed) & (lane < K))


@triton.jit
def swap_in_kernel(
    chosen,
    slots,
    table,
    held,
    order,
    where,
    rows,
    loads,
    counts,
    marks,
    table_stride,
    where_stride,
    requests,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Implements `KernelTable.swap_in` with D = PLACES; held, order, where, rows, loads and counts
    are written.

    `marks` int32 [requests, PLACES] starts as zeros; it marks the places of hits, then has the
    places for the misses, in order. One program per request. Reads at least 2 * K + 3 * PLACES
    int32 and writes 3 * K + PLACES for each request.
    """
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    lane, spot = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P)
    ids = tl.where(slot > 0, tl.load(chosen + request * K + lane, mask=lane < K, other=-1), -1)
    is_real = ids >= 0
    marked, has, places = marks + request * PLACES, held + slot * PLACES, where + slot * where_stride
    place = tl.load(places + ids, mask=is_real, other=-1)
    is_known = is_real & (place >= 0) & (place < PLACES)
    is_hit = is_known & (tl.load(has + place, mask=is_known, other=-1) == ids)
    is_miss = is_real & (is_hit == 0)
    missed = tl.sum(is_miss.to(tl.int32), axis=0)
    tl.store(marked + place, 1, mask=is_hit)
    tl.debug_barrier()

    line = tl.load(order + slot * PLACES + spot, mask=spot < PLACES, other=0)
    is_used = tl.load(marked + line, mask=spot < PLACES, other=1) != 0
    is_free = (spot < PLACES) & (is_used == 0)
    free = tl.sum(is_free.to(tl.int32), axis=0)
    rank = tl.cumsum(is_free.to(tl.int32), axis=0) - 1
    hits = tl.cumsum(((spot < PLACES) & is_used).to(tl.int32), axis=0) - 1
    later = tl.where(is_used, free + hits, tl.where(rank < missed, free - missed + rank, rank - missed))
    tl.debug_barrier()
    tl.store(order + slot * PLACES + later, line, mask=spot < tl.where(slot > 0, PLACES, 0))
    tl.store(marked + rank, line, mask=is_free & (rank < missed))
    tl.debug_barrier()

    turn = tl.cumsum(is_miss.to(tl.int32), axis=0) - 1
    place = tl.where(is_miss, tl.load(marked + turn, mask=is_miss, other=0), place)
    tl.store(has + place, ids, mask=is_miss)
    tl.store(places + ids, place, mask=is_miss)
    at = (slot * PLACES + place).to(tl.int32)
    tl.store(rows + request * K + lane, tl.where(is_real, at, -1), mask=lane < K)
    source = paged_rows(table, slot, ids, is_miss, table_stride, PAGE).to(tl.int32)
    store_loads(loads + request * K, turn, source, is_miss, lane, missed, K)
    store_loads(loads + (requests + request) * K, turn, at, is_miss, lane, missed, K)
    tl.store(counts + request, missed)


@triton.jit
def copy_rows_kernel(
    source,
    target,
    loads,
    counts,
    source_stride,
    target_stride,
    span,
    K,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.copy_rows` for rows of SIZE words; `span` is the distance from
    loads[0] to loads[1].

    One program per request and share: it copies every num_programs(1)-th tile of ROWS rows. Each
    row moves once over the link between host and device, which bounds the time.
    """
    request, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    # In a capture rehearsal the counts are not computed yet.
    count = tl.minimum(tl.load(counts + request), K)
    for first in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        taken = tl.load(loads + request * K + row, mask=row < count, other=0).to(tl.int64)
        given = tl.load(loads + span + request * K + row, mask=row < count, other=0).to(tl.int64)
        inside = (row < count)[:, None] & (column < SIZE)[None, :]
        words = tl.load(source + taken[:, None] * source_stride + column[None, :], mask=inside, other=0)
        tl.store(target + given[:, None] * target_stride + column[None, :], words, mask=inside)


def swap_in(
    chosen: Tensor,
    slots: Tensor,
    table: Tensor,
    rows_per_page: int,
    held: Tensor,
    order: Tensor,
    where: Tensor,
    rows: Tensor,
    loads: Tensor,
    counts: Tensor,
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.swap_in`: update the LRU cache of each request in place: the tables
    `held` (the entry in each place), `order` (the places, least recently used first) and `where`
    (the place of each entry). Write the device rows of the `chosen` entries to `rows` (-1: none
    chosen), and the copies from the host that they need to `loads` and `counts`. Slot 0 is padding.
    """
    (requests, count), places = chosen.shape, held.shape[1]
    if not requests:
        return
    marks = torch.zeros(requests, places, dtype=torch.int32, device=chosen.device)
    swap_in_kernel[(requests,)](
        chosen,
        slots,
        table,
        held,
        order,
        where,
        rows,
        loads,
        counts,
        marks,
        table.stride(0),
        where.stride(0),
        requests,
        K=count,
        PLACES=places,
        PAGE=rows_per_page,
        BLOCK_K=power_of_two(count),
        BLOCK_P=power_of_two(places),
        **tuning.options(tuning.swap_in),
    )


def copy_rows(source: Tensor, target: Tensor, loads: Tensor, counts: Tensor, tuning: Tuning = Tuning()) -> None:
    """Implement `KernelTable.copy_rows`: copy rows of `source` to rows of `target`, bit for bit, by
    the first counts[b] pairs of each request b in `loads` int32 [2, B, N]. Does not wait.
    """
    _, requests, count = loads.shape
    if not requests * count:
        return
    size = source.shape[1] * source.itemsize
    words = next(dtype for dtype in WORDS if size % dtype.itemsize == 0)
    source, target = source.view(words), target.view(words)
    block = power_of_two(size // words.itemsize)
    held = tuning.rows(block, count)
    shares = min(tiles(count, held), max(1, tuning.copy_programs // requests))
    copy_rows_kernel[(requests, shares)](
        source,
        target,
        loads,
        counts,
        source.stride(0),
        target.stride(0),
        requests * count,
        count,
        SIZE=size // words.itemsize,
        BLOCK=block,
        ROWS=held,
        **tuning.options(tuning.copy_rows),
    )
