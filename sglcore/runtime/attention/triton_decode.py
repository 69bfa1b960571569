"""Decode attention over pages in Triton.

The tokens of each request are split over programs, then merged. A split covers an equal share of
the row's length, read on the device, so one launch serves every length.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.triton_blocks import is_seen, load_cells
from sglcore.runtime.kernels.triton.products import NARROWEST_DOT
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.softmax import LOG2_E, begin, merged, parts_of, take_in
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two


@triton.jit
def decode_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    slots,
    seq_lens,
    visible,
    sinks,
    out,
    weights,
    q_stride,
    cell_stride,
    table_stride,
    scale,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Programs (row, kv head, split): out [rows, HEADS, SPLITS, DIM].

    If SPLITS > 1, also its log2 weights. Floor: 2 * seq_len * kv_heads * DIM elements of the cache
    for each row; the rest is small.
    """
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + row)
    slot = tl.load(slots + row).to(tl.int64)
    first = tl.maximum(seq_len - WINDOW, 0) if WINDOW else 0
    share = tl.cdiv(tl.cdiv(seq_len - first, SPLITS), TOKENS) * TOKENS
    start = first + split * share
    end = tl.minimum(start + share, seq_len)
    member, column = tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + member
    mine = (member < GROUP)[:, None] & (column < DIM)[None, :]
    query = tl.load(q + row * q_stride + (head * DIM)[:, None] + column[None, :], mask=mine, other=0.0)
    seen = tl.load(visible + row) if visible is not None else -1
    best, total = begin(sinks, head, member < tl.where(split == 0, GROUP, 0), QUERIES)
    mean = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    for at in range(start, end, TOKENS):
        position = at + tl.arange(0, TOKENS)
        inside = position < end
        if visible is not None:
            inside = inside & is_seen(seen, seq_len - 1 - position)
        keys, values = load_cells(
            k_cache, v_cache, page_table, slot, position, inside, kv_head, cell_stride, table_stride, PAGE, DIM, BLOCK_D
        )
        best, total, mean = take_in(query, keys, values, inside[None, :], scale, best, total, mean, SOFTCAP)
    part = (row * HEADS + head) * SPLITS + split
    total = tl.where(total > 0, total, 1.0)
    mean = mean / total[:, None]
    if SPLITS > 1:
        # Without a token and a sink `best` is still -inf, and so is the weight.
        tl.store(weights + part, best + tl.log2(total), mask=member < GROUP)
    tl.store(out + part[:, None] * DIM + column[None, :], narrow(mean, out.dtype.element_ty), mask=mine)


def splits_for(tuning: Tuning, rows: int, kv_heads: int, longest: int) -> int:
    """Return the number of splits that fills the device.

    For `rows` requests of up to `longest` tokens. Computed from upper bounds, never from lengths.
    """
    wanted = tuning.programs // max(1, rows * kv_heads)
    return max(1, min(wanted, tuning.most_splits, longest // tuning.decode_tokens))


def attend_singles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    splits: int,
    layer: Attention,
    tuning: Tuning,
    visible: Tensor | None = None,
) -> None:
    """Attend one query per row and write `out`, contiguous, of q's shape.

    q [R, heads * dim], caches [cells, kv_heads, dim], slots and seq_lens int [R], `visible` as in a
    batch. A row of length 0 becomes zero. Does not wait.
    """
    rows, kv_heads, dim = q.shape[0], k_cache.shape[1], k_cache.shape[2]
    if not rows:
        return
    heads, block = q.shape[1] // dim, max(power_of_two(dim), NARROWEST_DOT)
    result = out.view(rows, heads, dim)
    parts, weights = parts_of(result, splits)
    decode_kernel[(rows, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        page_table,
        slots,
        seq_lens,
        visible,
        layer.sinks,
        parts,
        weights,
        q.stride(0),
        k_cache.stride(0),
        page_table.stride(0),
        layer.scaling * LOG2_E.value,
        PAGE=page_size,
        GROUP=heads // kv_heads,
        HEADS=heads,
        DIM=dim,
        BLOCK_D=block,
        QUERIES=max(power_of_two(heads // kv_heads), NARROWEST_DOT),
        TOKENS=tuning.fitting(tuning.decode_tokens, block * k_cache.itemsize),
        SPLITS=splits,
        WINDOW=layer.sliding_window or 0,
        SOFTCAP=layer.softcap,
        **tuning.options(tuning.decode),
    )
    merged(parts, weights, result, tuning)
