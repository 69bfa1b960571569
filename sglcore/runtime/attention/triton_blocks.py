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
    """Return keys and values [TOKENS, BLOCK_D] of one KV head at the positions [TOKENS] of the
    request slot `slot`, from caches [cells, kv_heads, DIM] by `page_table` [slots, pages].

    Zero where `inside` bool [TOKENS] is False, which reads nothing, and in columns from DIM on.
    """
    page = tl.load(page_table + slot * table_stride + positions // PAGE, mask=inside, other=0).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    place = ((page * PAGE + positions % PAGE) * cell_stride)[:, None] + (kv_head * DIM + column)[None, :]
    loaded = inside[:, None] & (column < DIM)[None, :]
    return tl.load(k_cache + place, mask=loaded, other=0.0), tl.load(v_cache + place, mask=loaded, other=0.0)


@triton.jit
def is_seen(word, back):
    """Return whether a row with the `ForwardInputs.visible` word `word` sees the KV slot `back`
    places before its own: bit 31 - back; more than 31 places back, True. Both broadcast.
    """
    return (back > 31) | ((word >> (31 - tl.minimum(tl.maximum(back, 0), 31))) & 1 != 0)
