"""Rotary embedding of queries and keys, and the stores of keys and values, in one launch."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.reference_kernels import rotary_and_store as reference_rotary_and_store
from sglcore.runtime.kernels.triton.rotation import copy_rest, rotate_heads
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit(do_not_specialize=("tokens", "q_programs"))
def rotary_and_store_kernel(
    q,
    k,
    v,
    q_out,
    k_cache,
    v_cache,
    positions,
    cos_sin,
    cells,
    tokens,
    q_stride,
    k_stride,
    v_stride,
    cell_stride,
    q_programs,
    k_programs,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.rotary_and_store`: writes `q_out`, and rotated keys and values to the
    KV slots in `cells` (`out_cache_loc`) of the caches. R = 2 * HALF.

    One program per ROWS of the rows (token, head): the first `q_programs` for q, the next
    `k_programs` for k, then v. Reads and writes at least tokens * (Q_HEADS + 2 * K_HEADS) * DIM
    elements: k is written once, rotated.
    """
    program = tl.program_id(0)
    row = tl.arange(0, ROWS)
    if program < q_programs:
        flat = program * ROWS + row
        q_width: tl.constexpr = Q_HEADS * DIM
        rotate_heads(q, q_out, None, positions, cos_sin, flat, tokens, q_stride, q_width, Q_HEADS, HALF, BLOCK, DIM)
        if REST > 0:
            copy_rest(q, q_out, None, flat, tokens, q_stride, q_width, Q_HEADS, 2 * HALF, DIM, REST)
    elif program < q_programs + k_programs:
        flat = (program - q_programs) * ROWS + row
        rotate_heads(
            k, k_cache, cells, positions, cos_sin, flat, tokens, k_stride, cell_stride, K_HEADS, HALF, BLOCK, DIM
        )
        if REST > 0:
            copy_rest(k, k_cache, cells, flat, tokens, k_stride, cell_stride, K_HEADS, 2 * HALF, DIM, REST)
    else:
        flat = (program - q_programs - k_programs) * ROWS + row
        copy_rest(v, v_cache, cells, flat, tokens, v_stride, cell_stride, K_HEADS, 0, DIM, WHOLE)


def rotary_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    head_dim: int,
    k_cache: Tensor,
    v_cache: Tensor,
    out_cache_loc: Tensor,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.rotary_and_store`: return the rotated q, a new tensor; store the
    rotated k and v in the KV slots `out_cache_loc`. k itself does not change.

    Both caches have the same strides, and a KV slot's heads are contiguous. While tracing, a
    compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference_rotary_and_store(q, k, v, positions, cos_sin_cache, head_dim, k_cache, v_cache, out_cache_loc)
    tokens = q.shape[0]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return q_out
    q_heads, k_heads = q.shape[1] // head_dim, k.shape[1] // head_dim
    half = cos_sin_cache.shape[1] // 2
    held = tuning.rows(max(1, power_of_two(head_dim) // 2), tokens * q_heads)
    q_programs, k_programs = tiles(tokens * q_heads, held), tiles(tokens * k_heads, held)
    rotary_and_store_kernel[(q_programs + 2 * k_programs,)](
        q,
        k,
        v,
        q_out,
        k_cache,
        v_cache,
        positions,
        cos_sin_cache,
        out_cache_loc,
        tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_cache.stride(0),
        q_programs,
        k_programs,
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        HALF=half,
        BLOCK=power_of_two(half),
        DIM=head_dim,
        REST=power_of_two(head_dim - 2 * half) if head_dim > 2 * half else 0,
        WHOLE=power_of_two(head_dim),
        ROWS=held,
        **tuning.options(tuning.rotary_and_store),
    )
    return q_out
