"""Extend attention over pages in Triton.

Rows of several new tokens, each after a prefix in the cache. New keys and values are stored before,
so the kernel reads prefix and new tokens alike, page by page.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.triton_blocks import load_cells
from sglcore.runtime.kernels.triton.products import NARROWEST_DOT
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.softmax import LOG2_E, begin, take_in
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def extend_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    slots,
    seq_lens,
    new_lens,
    starts,
    sinks,
    out,
    q_stride,
    out_stride,
    cell_stride,
    table_stride,
    scale,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend the new tokens of each row to its prefix and to themselves, causally; arguments are
    those of `attend_rows`, `scale` includes log2(e).

    One program per tile of a row's new tokens, KV head and row; a query row is a (token, head of
    the group). Reads at least, for each tile, the keys and values of all tokens that it sees; the
    matrix unit, not memory, is the limit.
    """
    HELD: tl.constexpr = QUERIES // GROUP
    kv_head, row = tl.program_id(1), tl.program_id(2)
    new = tl.load(new_lens + row)
    first = tl.program_id(0) * HELD
    if first >= new:
        return
    slot, seq_len = tl.load(slots + row).to(tl.int64), tl.load(seq_lens + row)
    member, column = tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
    token, head = first + member // GROUP, kv_head * GROUP + member % GROUP
    mine = (token < tl.minimum(first + HELD, new))[:, None] & (column < DIM)[None, :]
    line = (tl.load(starts + row) + token).to(tl.int64)
    query = tl.load(q + (line * q_stride + head * DIM)[:, None] + column[None, :], mask=mine, other=0.0)
    asked = seq_len - new + token
    end = tl.minimum(seq_len - new + first + HELD, seq_len)
    start = tl.maximum(seq_len - new + first - (WINDOW - 1), 0) // TOKENS * TOKENS if WINDOW else 0
    best, total = begin(sinks, head, token < new, QUERIES)
    mean = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    for at in range(start, end, TOKENS):
        position = at + tl.arange(0, TOKENS)
        inside = position < end
        keys, values = load_cells(
            k_cache, v_cache, page_table, slot, position, inside, kv_head, cell_stride, table_stride, PAGE, DIM, BLOCK_D
        )
        seen = inside[None, :] & (position[None, :] <= asked[:, None])
        if WINDOW:
            seen = seen & (position[None, :] > asked[:, None] - WINDOW)
        best, total, mean = take_in(query, keys, values, seen, scale, best, total, mean, SOFTCAP)
    mean = mean / tl.where(total > 0, total, 1.0)[:, None]
    place = out + (line * out_stride + head * DIM)[:, None] + column[None, :]
    tl.store(place, narrow(mean, out.dtype.element_ty), mask=mine)


def attend_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    seq_lens: Tensor,
    new_lens: Tensor,
    starts: Tensor,
    longest: int,
    out: Tensor,
    layer: Attention,
    tuning: Tuning,
) -> None:
    """Attend rows of several tokens; `slots` (request slots), `seq_lens` (with the new tokens),
    `new_lens` and `starts` int [R]. The new keys and values are in the caches [cells, kv_heads,
    dim] already.

    Row r has the queries [starts[r], starts[r] + new_lens[r]) of q [T, heads * dim]; results go to
    the same rows of `out`, other rows do not change. `longest` is the host's upper bound of
    new_lens. Does not wait.
    """
    rows, kv_heads, dim = slots.shape[0], k_cache.shape[1], k_cache.shape[2]
    group, block = q.shape[1] // dim // kv_heads, max(power_of_two(dim), NARROWEST_DOT)
    # Float32 products do not use the matrix unit and need twice the registers.
    share = max(1, k_cache.itemsize // 2)
    most = min(tuning.extend_queries // share, power_of_two(longest * group))
    queries = max(most, power_of_two(group), NARROWEST_DOT)
    extend_kernel[(tiles(longest, queries // group), kv_heads, rows)](
        q,
        k_cache,
        v_cache,
        page_table,
        slots,
        seq_lens,
        new_lens,
        starts,
        layer.sinks,
        out,
        q.stride(0),
        out.stride(0),
        k_cache.stride(0),
        page_table.stride(0),
        layer.scaling * LOG2_E.value,
        PAGE=page_size,
        GROUP=group,
        DIM=dim,
        BLOCK_D=block,
        QUERIES=queries,
        TOKENS=tuning.fitting(tuning.extend_tokens // share, block * k_cache.itemsize),
        WINDOW=layer.sliding_window or 0,
        SOFTCAP=layer.softcap,
        **tuning.options(tuning.extend),
    )
