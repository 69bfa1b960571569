"""Latent rows: norm and rotation of queries, keys and entries, and their stores in a pool, in 8
bits if the pool has a codec.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.triton.rotation import row_of
from sglcore.runtime.kernels.triton.rounding import narrow, rounded
from sglcore.runtime.kernels.triton.sparse.pool_rows import form_of
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def float8_bits(x):
    """Return the bits of float32 x as float8 e4m3fn, in int32, rounded to nearest with ties to
    even.

    The magnitude of x is at most 448. Works on devices without that format.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Values below 2^-6 are multiples of 2^-9: the addition rounds.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return sign | tl.where(size < 0x3C800000, small, normal)


@triton.jit
def store_encoded(values, line, column, live, SIZE, EXACT, GROUP, BIAS, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Encode the first SIZE columns of float32 values [ROWS, BLOCK] in the format of `RowCodec` and
    store them at the uint8 addresses `line` [ROWS], except where `live` is false.

    `column` is 0 ... BLOCK - 1; SIZE, EXACT, GROUP and BIAS are those of `form_of`.
    """
    ROUNDED: tl.constexpr = SIZE - EXACT
    SPAN: tl.constexpr = min(GROUP, BLOCK)
    group = tl.arange(0, BLOCK // SPAN)
    is_small = column < ROUNDED
    apart = tl.reshape(tl.where(is_small[None, :], values, 0.0), [ROWS, BLOCK // SPAN, SPAN])
    largest = tl.maximum(tl.max(tl.abs(apart), axis=2), 1e-4)
    # The exponent, with its bias, of the least power of two that is at least largest / 448; 448 is
    # 1.75 * 2^8.
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    small = float8_bits(tl.reshape(apart * inverse[:, :, None], [ROWS, BLOCK]))
    # With the other bias the same bits mean half as much, so the scale doubles; there negative zero
    # is NaN.
    if BIAS != 7:
        small = tl.where(small == 0x80, 0, small)
        exponent += BIAS - 7
    tl.store(line[:, None] + column[None, :], small.to(tl.uint8), mask=live[:, None] & is_small[None, :])
    scales = line[:, None] + (ROUNDED + 2 * EXACT + group)[None, :]
    tl.store(scales, exponent.to(tl.uint8), mask=live[:, None] & (group * GROUP < ROUNDED)[None, :])
    if EXACT > 0:
        place = (line[:, None] + (2 * column - ROUNDED)[None, :]).to(tl.pointer_type(tl.bfloat16))
        is_exact = live[:, None] & ((column >= ROUNDED) & (column < SIZE))[None, :]
        tl.store(place, narrow(values, tl.bfloat16), mask=is_exact)


@triton.jit
def store_rows(
    values, rows, row, column, live, stride, dtype, SIZE, EXACT, GROUP, BIAS, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Round float32 values [ROWS, BLOCK] to dtype and store their first SIZE elements in the rows
    `row` of the pool, `stride` elements apart.

    GROUP > 0: in the format of `RowCodec` (`form_of`); 0: as numbers of the pool's dtype.
    """
    values, line = rounded(values, dtype), rows + row * stride
    if GROUP > 0:
        store_encoded(values, line, column, live, SIZE, EXACT, GROUP, BIAS, BLOCK, ROWS)
    else:
        inside = live[:, None] & (column < SIZE)[None, :]
        tl.store(line[:, None] + column[None, :], narrow(values, rows.dtype.element_ty), mask=inside)


@triton.jit
def gained(start, column, live, scale, weight, SIZE: tl.constexpr, NORMED: tl.constexpr):
    """Load the elements `column` of the rows at `start` as float32, and multiply the first NORMED
    by the row's `scale` and the weight (None: by `scale` only).

    0 outside [0, SIZE) and where `live` is false.
    """
    inside = live[:, None] & ((column >= 0) & (column < SIZE))[None, :]
    values = tl.load(start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORMED > 0:
        normed = values * scale[:, None]
        if weight is not None:
            is_normed = (column >= 0) & (column < NORMED)
            normed = normed * tl.load(weight + column, mask=is_normed, other=0.0).to(tl.float32)[None, :]
        values = tl.where((column < NORMED)[None, :], normed, values)
    return values


@triton.jit
def tail_kernel(
    x,
    weight,
    positions,
    cos_sin,
    out,
    out_rows,
    rows,
    token_stride,
    head_stride,
    out_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    HALF: tl.constexpr,
    IS_INVERSE: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.rope_tail`, for the rows (token, head) of x to `out`, and
    `norm_rope_store`, for HEADS = 1 and the pool `out`.

    `rows` is tokens * HEADS; the first NORMED elements are normalised, the last 2 * HALF rotated.
    `out_rows` None: row t is stored at row t. One program per ROWS rows; the other element of a
    pair is loaded again, from the cache. Reads and writes at least rows * SIZE elements.
    """
    flat = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, live = tl.arange(0, BLOCK), flat < rows
    flat = flat.to(tl.int64)
    token = flat // HEADS
    start = x + token * token_stride + flat % HEADS * head_stride
    scale = tl.zeros([ROWS], tl.float32)
    if NORMED > 0:
        wide = gained(start, column, live, scale, None, NORMED, 0)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / NORMED + eps)
    own = gained(start, column, live, scale, weight, SIZE, NORMED)
    tail = column - (SIZE - 2 * HALF)
    beside = gained(start, (tail ^ 1) + (SIZE - 2 * HALF), live, scale, weight, SIZE, NORMED)
    position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
    angle = cos_sin + position[:, None] * (2 * HALF) + (tail // 2)[None, :]
    is_turned = live[:, None] & ((tail >= 0) & (tail < 2 * HALF))[None, :]
    cos = tl.load(angle, mask=is_turned, other=1.0)
    sin = tl.load(angle + HALF, mask=is_turned, other=0.0)
    is_first = ((tail % 2 == 0) != IS_INVERSE)[None, :]
    values = tl.where(is_turned, own * cos + tl.where(is_first, -beside, beside) * sin, own)
    row = row_of(flat, out_rows, rows)
    store_rows(values, out, row, column, live, out_stride, x.dtype.element_ty, SIZE, EXACT, GROUP, BIAS, BLOCK, ROWS)


@triton.jit
def index_key_kernel(
    x,
    weight,
    bias,
    positions,
    cos_sin,
    out,
    out_rows,
    tokens,
    token_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.index_key_store`; `out` is its pool `rows`, R = 2 * HALF.

    One program per ROWS tokens. Reads and writes at least tokens * SIZE elements.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, live = tl.arange(0, BLOCK), token < tokens
    token = token.to(tl.int64)
    start = x + token * token_stride
    wide = gained(start, column, live, token, None, SIZE, 0)
    mean = tl.sum(wide, axis=1) / SIZE
    apart = tl.where((column < SIZE)[None, :], wide - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(apart * apart, axis=1) / SIZE + eps)
    own = normed_by(apart, scale, weight, bias, column, SIZE)
    other = tl.where(column < HALF, column + HALF, column - HALF)
    beside = gained(start, other, live, token, None, SIZE, 0) - mean[:, None]
    beside = normed_by(beside, scale, weight, bias, other, SIZE)
    position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
    angle = cos_sin + position[:, None] * (2 * HALF) + (column % HALF)[None, :]
    is_turned = live[:, None] & (column < 2 * HALF)[None, :]
    cos = tl.load(angle, mask=is_turned, other=1.0)
    sin = tl.load(angle + HALF, mask=is_turned, other=0.0)
    turned = own * cos + tl.where((column < HALF)[None, :], -beside, beside) * sin
    row = row_of(token, out_rows, tokens)
    values = tl.where(is_turned, turned, own)
    store_rows(values, out, row, column, live, out_stride, x.dtype.element_ty, SIZE, EXACT, GROUP, BIAS, BLOCK, ROWS)


@triton.jit
def normed_by(apart, scale, weight, bias, column, SIZE: tl.constexpr):
    """Return apart * scale * weight + bias as float32, with the weight and bias of the elements
    `column`; `apart` are differences from the mean.
    """
    inside = (column >= 0) & (column < SIZE)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return (
        apart * scale[:, None] * gain[None, :] + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    )


def rope_tail(
    x: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    norm_eps: float | None,
    is_inverse: bool,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.rope_tail`: return x [T, H, D] with the last R elements of each head
    rotated, a new tensor; elements of a head are contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normed = 0 if norm_eps is None else x.shape[2]
    _tails(x, None, norm_eps or 0.0, positions, cos_sin_cache, out, None, None, normed, is_inverse, tuning)
    return out


def norm_rope_store(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    rows: Tensor,
    out_rows: Tensor,
    codec: RowCodec | None,
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.norm_rope_store`: norm and rotate each row of x [T, D], and store it
    at rows[out_rows[t]], encoded by `codec` or as numbers (None).
    """
    normed = weight.shape[0]
    _tails(x.unsqueeze(1), weight, eps, positions, cos_sin_cache, rows, out_rows, codec, normed, False, tuning)


def _tails(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    out: Tensor,
    out_rows: Tensor | None,
    codec: RowCodec | None,
    normed: int,
    is_inverse: bool,
    tuning: Tuning,
) -> None:
    tokens, heads, size = x.shape
    if not tokens:
        return
    block = power_of_two(size)
    held = tuning.rows(block, tokens * heads)
    tail_kernel[(tiles(tokens * heads, held),)](
        x,
        weight,
        positions,
        cos_sin_cache,
        out,
        out_rows,
        tokens * heads,
        x.stride(0),
        x.stride(1),
        size if out_rows is None else out.stride(0),
        eps,
        HEADS=heads,
        SIZE=size,
        NORMED=normed,
        HALF=cos_sin_cache.shape[1] // 2,
        IS_INVERSE=is_inverse,
        BLOCK=block,
        ROWS=held,
        **form_of(codec),
        **tuning.options(tuning.rope_tail),
    )


def index_key_store(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    rows: Tensor,
    out_rows: Tensor,
    codec: RowCodec | None,
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.index_key_store`: layer norm and rotate each row of x [T, D], and
    store it at rows[out_rows[t]], encoded by `codec` or as numbers (None).
    """
    tokens, size = x.shape
    if not tokens:
        return
    block = power_of_two(size)
    held = tuning.rows(block, tokens)
    index_key_kernel[(tiles(tokens, held),)](
        x,
        weight,
        bias,
        positions,
        cos_sin_cache,
        rows,
        out_rows,
        tokens,
        x.stride(0),
        rows.stride(0),
        eps,
        SIZE=size,
        HALF=cos_sin_cache.shape[1] // 2,
        BLOCK=block,
        ROWS=held,
        **form_of(codec),
        **tuning.options(tuning.rope_tail),
    )
