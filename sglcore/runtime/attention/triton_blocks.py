"""What decode and extend attention share in Triton: blocks of cells, and softmax over one block after another."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from sglcore.runtime.kernels.triton.products import wide_dot
from sglcore.runtime.kernels.triton.rounding import narrow

LOG2_E = tl.constexpr(1.4426950408889634)
"""Scores are kept in base 2, whose exponential is one instruction."""


@triton.jit
def load_cells(
    k_cache,
    v_cache,
    page_table,
    slot,
    positions,
    inside,
    kv_head,
    cell_stride,
    table_stride,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys and values [TOKENS, BLOCK_D] of a slot's positions; zero where not inside."""
    page = tl.load(page_table + slot * table_stride + positions // PAGE, mask=inside, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    place = ((page * PAGE + positions % PAGE) * cell_stride)[:, None] + (kv_head * DIM + column)[None, :]
    loaded = inside[:, None] & (column < DIM)[None, :]
    return tl.load(k_cache + place, mask=loaded, other=0.0), tl.load(v_cache + place, mask=loaded, other=0.0)


@triton.jit
def begin(sinks, head, counted, QUERIES: tl.constexpr):
    """The running maximum and sum of each query row [QUERIES] before the first block: those of its head's sink, where it is
    counted and there are sinks at all."""
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    if sinks is not None:
        best = tl.load(sinks + head, mask=counted, other=float("-inf")).to(tl.float32) * LOG2_E
    return best, tl.where(best > float("-inf"), 1.0, 0.0)


@triton.jit
def take_in(query, keys, values, seen, scale, best, total, mean, SOFTCAP: tl.constexpr):
    """The running maximum, sum and weighted sum of each query row [QUERIES] after one more block (Milakov and Gimelshein
    2018); seen [QUERIES, TOKENS], or a part of that shape, says which of the block's tokens a row sees."""
    score = wide_dot(query, tl.trans(keys)) * scale
    if SOFTCAP is not None:
        # tanh x = 1 - 2 / (e^2x + 1), and the score is a power of two's.
        score = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (tl.exp2(score * (2.0 / SOFTCAP)) + 1.0))
    score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(best, tl.max(score, axis=1))
    # A row that has seen nothing yet has -inf here, from which nothing can be subtracted.
    level = tl.where(higher > float("-inf"), higher, 0.0)
    weight = tl.exp2(score - level[:, None])
    fade = tl.exp2(best - level)
    total = total * fade + tl.sum(weight, axis=1)
    mean = mean * fade[:, None] + wide_dot(narrow(weight, values.dtype), values)
    return higher, total, mean
