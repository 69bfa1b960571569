"""Triton functions for decode and extend attention: load the keys and values of a block of KV
slots, and test visibility words.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


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
    """Return keys and values [TOKENS, BLOCK_D] of one KV head at the positions [TOKENS] of a
    request slot; zero where not inside.
    """
    page = tl.load(page_table + slot * table_stride + positions // PAGE, mask=inside, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    place = ((page * PAGE + positions % PAGE) * cell_stride)[:, None] + (kv_head * DIM + column)[None, :]
    loaded = inside[:, None] & (column < DIM)[None, :]
    return tl.load(k_cache + place, mask=loaded, other=0.0), tl.load(v_cache + place, mask=loaded, other=0.0)


@triton.jit
def is_seen(word, back):
    """Return whether a row with the `ForwardInputs.visible` word sees the KV slot `back` places
    before its own.
    """
    return (back > 31) | ((word >> (31 - tl.minimum(tl.maximum(back, 0), 31))) & 1 != 0)
