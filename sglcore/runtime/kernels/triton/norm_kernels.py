"""Root mean square norms: plain, after adding the residual, and gated. One pass over rows that are
held in registers.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.reference_kernels import add_rms_norm as reference_add_rms_norm
from sglcore.runtime.kernels.reference_kernels import rms_norm as reference_rms_norm
from sglcore.runtime.kernels.triton.rounding import narrow, rounded
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    rows,
    outer_stride,
    inner_stride,
    eps,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.rms_norm`; out [rows, SIZE] is its result.

    x is [rows / INNER, INNER, SIZE] with the strides of its first two axes. One program per ROWS
    rows. Reads x and writes out once at least, 2 * rows * SIZE elements; the weight stays in the
    cache.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    row = row.to(tl.int64)
    start = (row // INNER) * outer_stride + (row % INNER) * inner_stride
    wide = tl.load(x + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normed = rounded(wide * scale[:, None], weight.dtype.element_ty)
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    place = out + row[:, None] * SIZE + column[None, :]
    tl.store(place, narrow(normed * gain[None, :], out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.add_rms_norm` in place: `residual` gets the sum and `x` its norm.

    One program per ROWS rows of SIZE elements. Reads and writes both once, 4 * rows * SIZE
    elements.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    row = row.to(tl.int64)
    place = x + row[:, None] * x_stride + column[None, :]
    sums = residual + row[:, None] * residual_stride + column[None, :]
    added = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    total = narrow(tl.load(sums, mask=inside, other=0.0).to(tl.float32) + added, residual.dtype.element_ty)
    tl.store(sums, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normed = rounded(wide * scale[:, None], weight.dtype.element_ty)
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    tl.store(place, narrow(normed * gain[None, :], x.dtype.element_ty), mask=inside)


@triton.jit
def gated_rms_norm_kernel(
    x,
    gate,
    weight,
    out,
    rows,
    x_stride,
    gate_stride,
    eps,
    INNER: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Implements `KernelTable.gated_rms_norm`; `out` is its result.

    A row here is one group of SIZE elements: INNER of them are a row of x, and the weight has
    GROUPS. One program per ROWS rows. Reads x and gate and writes out once at least, 3 * rows *
    SIZE elements.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    row = row.to(tl.int64)
    place = ((row % INNER) * SIZE)[:, None] + column[None, :]
    wide = tl.load(x + (row // INNER * x_stride)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
    closed = tl.load(gate + (row // INNER * gate_stride)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
    opened = closed / (1.0 + tl.exp(-closed))
    if GATE_FIRST:
        wide = wide * opened
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    normed = rounded(wide * scale[:, None], out.dtype.element_ty)
    gains = weight + ((row % GROUPS) * SIZE)[:, None] + column[None, :]
    result = normed * tl.load(gains, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        result = rounded(result, out.dtype.element_ty) * opened
    tl.store(out + row[:, None] * SIZE + column[None, :], narrow(result, out.dtype.element_ty), mask=inside)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool, tuning: Tuning = Tuning()
) -> Tensor:
    """Implement `KernelTable.gated_rms_norm`: x and gate [T, N], weight [G, size] to a new tensor
    [T, N]. Each `size` elements are normed, and multiplied by silu(gate) before the norm if
    `gate_first`, otherwise after it.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups, size = weight.shape
    rows = x.numel() // size
    if not rows:
        return out
    held = tuning.rows(power_of_two(size), rows)
    gated_rms_norm_kernel[(tiles(rows, held),)](
        x,
        gate,
        weight,
        out,
        rows,
        x.stride(0),
        gate.stride(0),
        eps,
        INNER=x.shape[1] // size,
        GROUPS=groups,
        SIZE=size,
        GATE_FIRST=gate_first,
        BLOCK=power_of_two(size),
        ROWS=held,
        **tuning.options(tuning.gated_rms_norm),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, tuning: Tuning = Tuning()) -> Tensor:
    """Implement `KernelTable.rms_norm`: return a new tensor of the shape and dtype of x. x is read
    in place by its strides if it is [T, N] or [T, heads, N] with a contiguous last axis; otherwise
    a copy may be made.

    While tracing, a compiler gets the reference.
    """
    if torch.compiler.is_compiling():
        return reference_rms_norm(x, weight, eps)
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.reshape(-1, x.shape[-1]).contiguous().view(x.shape)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = x.shape[-1]
    rows = x.numel() // size if size else 0
    if not rows:
        return out
    by_row = x if x.dim() in (2, 3) else x.view(-1, size)
    inner = by_row.shape[1] if by_row.dim() == 3 else 1
    held = tuning.rows(power_of_two(size), rows)
    rms_norm_kernel[(tiles(rows, held),)](
        by_row,
        weight,
        out,
        rows,
        by_row.stride(0),
        by_row.stride(1),
        eps,
        INNER=inner,
        SIZE=size,
        BLOCK=power_of_two(size),
        ROWS=held,
        **tuning.options(tuning.rms_norm),
    )
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, tuning: Tuning = Tuning()
) -> tuple[Tensor, Tensor]:
    """Implement `KernelTable.add_rms_norm`: write the sum to `residual` and its norm to `x`, and
    return (x, residual).

    While tracing, a compiler gets the reference, which writes to neither and returns new tensors.
    """
    if torch.compiler.is_compiling():
        return reference_add_rms_norm(x, residual, weight, eps)
    rows, size = x.shape
    if not rows:
        return x, residual
    held = tuning.rows(power_of_two(size), rows)
    add_rms_norm_kernel[(tiles(rows, held),)](
        x,
        residual,
        weight,
        rows,
        x.stride(0),
        residual.stride(0),
        eps,
        SIZE=size,
        BLOCK=power_of_two(size),
        ROWS=held,
        **tuning.options(tuning.add_rms_norm),
    )
    return x, residual
