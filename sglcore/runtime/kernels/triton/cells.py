"""KV slots of the paged pool: the location of each token, and the writes of its key and value."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def store_kv_kernel(
    key,
    value,
    k_cache,
    v_cache,
    cells,
    tokens,
    key_stride,
    value_stride,
    cell_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements `KernelTable.store_kv`; `cells` is its `out_cache_loc`, and `cell_stride` that of
    both caches.

    One program per ROWS tokens and BLOCK of WIDTH = kv_heads * head_dim elements. Reads and writes
    at least 2 * tokens * WIDTH elements.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (column < WIDTH)[None, :]
    cell = tl.load(cells + row, mask=row < tokens, other=0).to(tl.int64) * cell_stride
    row = row.to(tl.int64)
    place = cell[:, None] + column[None, :]
    keys = tl.load(key + row[:, None] * key_stride + column[None, :], mask=inside, other=0.0)
    values = tl.load(value + row[:, None] * value_stride + column[None, :], mask=inside, other=0.0)
    tl.store(k_cache + place, narrow(keys.to(tl.float32), k_cache.dtype.element_ty), mask=inside)
    tl.store(v_cache + place, narrow(values.to(tl.float32), v_cache.dtype.element_ty), mask=inside)


@triton.jit
def cache_locations_kernel(
    page_table, slots, positions, out, tokens, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Implements `KernelTable.cache_locations`; `out` is its `out_cache_loc`.

    One program per BLOCK tokens. Reads at least three int32 and writes one index for each token.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=inside, other=0)
    page = tl.load(page_table + slot * table_stride + position // PAGE, mask=inside, other=0).to(tl.int64)
    tl.store(out + token, (page * PAGE + position % PAGE).to(out.dtype.element_ty), mask=inside)


def store_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor, tuning: Tuning = Tuning()
) -> None:
    """Implement `KernelTable.store_kv`: write row t of key and value [T, kv_heads, D] to KV slot
    out_cache_loc[t] of both caches, cast to their dtype.

    Both caches have the same strides, and a KV slot's heads are contiguous.
    """
    tokens = key.shape[0]
    if not tokens:
        return
    key, value = key.flatten(1), value.flatten(1)
    width = key.shape[1]
    block = min(power_of_two(width), tuning.elements)
    held = tuning.rows(block, tokens)
    store_kv_kernel[(tiles(tokens, held), tiles(width, block))](
        key,
        value,
        k_cache,
        v_cache,
        out_cache_loc,
        tokens,
        key.stride(0),
        value.stride(0),
        k_cache.stride(0),
        WIDTH=width,
        ROWS=held,
        BLOCK=block,
        **tuning.options(tuning.store_kv),
    )


def cache_locations(
    page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int, out: Tensor, tuning: Tuning = Tuning()
) -> None:
    """Implement `KernelTable.cache_locations`: write to `out` int [T] the KV slot of each token, by
    its request slot, its position and the pages in `page_table`.
    """
    tokens = positions.shape[0]
    if not tokens:
        return
    block = tuning.rows(1, tokens)
    cache_locations_kernel[(tiles(tokens, block),)](
        page_table,
        slots,
        positions,
        out,
        tokens,
        page_table.stride(0),
        PAGE=page_size,
        BLOCK=block,
        **tuning.options(tuning.cache_locations),
    )
