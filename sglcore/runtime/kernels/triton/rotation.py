"""Rotary embedding of queries and keys in one launch."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.reference_kernels import rotary as reference_rotary
from sglcore.runtime.kernels.triton.rounding import narrow, rounded
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def row_of(token, cells, tokens):
    """Return the target row of each token, int64: its KV slot in `cells` (0 for tokens at or past
    `tokens`), or, if `cells` is None, its own index `token`.
    """
    row = token
    if cells is not None:
        row = tl.load(cells + token, mask=token < tokens, other=0).to(tl.int64)
    return row


@triton.jit
def rotate_heads(
    x,
    out,
    cells,
    positions,
    cos_sin,
    flat,
    tokens,
    x_stride,
    out_stride,
    HEADS,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    """Rotate the rows `flat` = token * HEADS + head of x [tokens, HEADS * DIM] and store them in
    out.

    Token t is stored at t * out_stride, or, with `cells`, at cells[t] * out_stride. The rotated
    elements are the first 2 * HALF of a head; cos_sin is `KernelTable.rotary`'s cache. Products and
    their sum are rounded to x's dtype, as in the reference.
    """
    token, head = (flat // HEADS).to(tl.int64), flat % HEADS
    column = tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < HALF)[None, :]
    position = tl.load(positions + token, mask=token < tokens, other=0).to(tl.int64)
    angle = cos_sin + position[:, None] * (2 * HALF) + column[None, :]
    dtype = x.dtype.element_ty
    cos = rounded(tl.load(angle, mask=inside, other=0.0), dtype)
    sin = rounded(tl.load(angle + HALF, mask=inside, other=0.0), dtype)
    place = x + (token * x_stride + head * DIM)[:, None] + column[None, :]
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=inside, other=0.0).to(tl.float32)
    left = rounded(first * cos, dtype) - rounded(second * sin, dtype)
    right = rounded(second * cos, dtype) + rounded(first * sin, dtype)
    if out.dtype.element_ty != dtype:
        left, right = rounded(left, dtype), rounded(right, dtype)
    place = out + (row_of(token, cells, tokens) * out_stride + head * DIM)[:, None] + column[None, :]
    tl.store(place, narrow(left, out.dtype.element_ty), mask=inside)
    tl.store(place + HALF, narrow(right, out.dtype.element_ty), mask=inside)


@triton.jit
def copy_rest(
    x, out, cells, flat, tokens, x_stride, out_stride, HEADS, FROM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr
):
    """Copy the elements [FROM, DIM) of each head of x to the same places of out, cast to its dtype.

    The other arguments are those of `rotate_heads`; REST is a power of two, at least DIM - FROM.
    """
    token, head = (flat // HEADS).to(tl.int64), flat % HEADS
    column = FROM + tl.arange(0, REST)
    inside = (token < tokens)[:, None] & (column < DIM)[None, :]
    values = tl.load(x + (token * x_stride + head * DIM)[:, None] + column[None, :], mask=inside, other=0.0)
    if out.dtype.element_ty != x.dtype.element_ty:
        values = narrow(values.to(tl.float32), out.dtype.element_ty)
    place = out + (row_of(token, cells, tokens) * out_stride + head * DIM)[:, None] + column[None, :]
    tl.store(place, values, mask=inside)


@triton.jit
def rotary_kernel(
    q,
    k,
    q_out,
    k_out,
    positions,
    cos_sin,
    tokens,
    q_stride,
    k_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.rotary` with R = 2 * HALF; writes `q_out` and `k_out`.

    One program per ROWS of the rows (token, head) of q or of k. Reads and writes q and k once at
    least.
    """
    flat = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) == 0:
        rotate_heads(
            q, q_out, None, positions, cos_sin, flat, tokens, q_stride, Q_HEADS * DIM, Q_HEADS, HALF, BLOCK, DIM
        )
        if REST > 0:
            copy_rest(q, q_out, None, flat, tokens, q_stride, Q_HEADS * DIM, Q_HEADS, 2 * HALF, DIM, REST)
    else:
        rotate_heads(
            k, k_out, None, positions, cos_sin, flat, tokens, k_stride, K_HEADS * DIM, K_HEADS, HALF, BLOCK, DIM
        )
        if REST > 0:
            copy_rest(k, k_out, None, flat, tokens, k_stride, K_HEADS * DIM, K_HEADS, 2 * HALF, DIM, REST)


def rotary(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int, tuning: Tuning = Tuning()
) -> tuple[Tensor, Tensor]:
    """Implement `KernelTable.rotary`: return q [T, heads * head_dim] and k [T, kv_heads * head_dim]
    rotated by the rows `positions` of the cache, as new tensors.

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference_rotary(q, k, positions, cos_sin_cache, head_dim)
    tokens = q.shape[0]
    q_out, k_out = (torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in (q, k))
    if not tokens:
        return q_out, k_out
    q_heads, k_heads = q.shape[1] // head_dim, k.shape[1] // head_dim
    half = cos_sin_cache.shape[1] // 2
    rows = tokens * max(q_heads, k_heads)
    held = tuning.rows(power_of_two(half), rows)
    rotary_kernel[(tiles(rows, held), 2)](
        q,
        k,
        q_out,
        k_out,
        positions,
        cos_sin_cache,
        tokens,
        q.stride(0),
        k.stride(0),
        Q_HEADS=q_heads,
        K_HEADS=k_heads,
        HALF=half,
        BLOCK=power_of_two(half),
        DIM=head_dim,
        REST=power_of_two(head_dim - 2 * half) if head_dim > 2 * half else 0,
        ROWS=held,
        **tuning.options(tuning.rotary),
    )
    return q_out, k_out
