"""The gated activation of a feed-forward block, in one pass."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.reference_kernels import gelu_tanh_and_mul as reference_gelu_tanh_and_mul
from sglcore.runtime.kernels.reference_kernels import limited_silu_and_mul as reference_limited_silu_and_mul
from sglcore.runtime.kernels.reference_kernels import silu_and_mul as reference_silu_and_mul
from sglcore.runtime.kernels.triton.rounding import narrow, rounded
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def limited(gate, up, limit, dtype: tl.constexpr):
    """Return gate, at most `limit`, and up, within +-`limit`, as float32 rounded to dtype
    (`KernelTable.limited_silu_and_mul`).
    """
    return rounded(tl.minimum(gate, limit), dtype), rounded(tl.minimum(tl.maximum(up, -limit), limit), dtype)


@triton.jit
def silu_times(gate, up, limit, dtype: tl.constexpr, LIMITED: tl.constexpr):
    """Return silu(gate) * up in float32; gate, up and silu(gate) are rounded to dtype before.

    LIMITED: gate and up are limited as in `limited_silu_and_mul`; otherwise `limit` is not read.
    """
    gate, up = rounded(gate, dtype), rounded(up, dtype)
    if LIMITED:
        gate, up = limited(gate, up, limit, dtype)
    return rounded(gate / (1.0 + tl.exp(-gate)), dtype) * up


@triton.jit
def gated_kernel(
    x,
    out,
    rows,
    x_stride,
    limit,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """Implements `KernelTable.silu_and_mul`, `gelu_tanh_and_mul` (IS_GELU) and
    `limited_silu_and_mul` (`limit` is not None): x [rows, 2 * SIZE] to out [rows, SIZE].

    GELU is gate * sigmoid(2 z), where z is the argument of its tanh. One program per ROWS rows and
    BLOCK columns. Reads at least 2 * rows * SIZE elements and writes rows * SIZE.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    row = row.to(tl.int64)
    place = x + row[:, None] * x_stride + column[None, :]
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + SIZE, mask=inside, other=0.0).to(tl.float32)
    if limit is not None:
        gate, up = limited(gate, up, limit, out.dtype.element_ty)
    turned = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    active = rounded(gate / (1.0 + tl.exp(-turned)), out.dtype.element_ty)
    tl.store(out + row[:, None] * SIZE + column[None, :], narrow(active * up, out.dtype.element_ty), mask=inside)


def silu_and_mul(x: Tensor, tuning: Tuning = Tuning()) -> Tensor:
    """Implement `KernelTable.silu_and_mul`: x [T, 2 I] to a new tensor [T, I], silu of the first I
    columns times the others.

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference_silu_and_mul(x)
    return _gated(x, False, None, tuning)


def gelu_tanh_and_mul(x: Tensor, tuning: Tuning = Tuning()) -> Tensor:
    """Implement `KernelTable.gelu_tanh_and_mul`: x [T, 2 I] to a new tensor [T, I], GELU (tanh
    approximation) of the first I columns times the others.

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference_gelu_tanh_and_mul(x)
    return _gated(x, True, None, tuning)


def limited_silu_and_mul(x: Tensor, limit: float, tuning: Tuning = Tuning()) -> Tensor:
    """Implement `KernelTable.limited_silu_and_mul`: as `silu_and_mul`, with the first I columns at
    most `limit` and the others within +-`limit`.

    While tracing, a compiler gets the reference and fuses it.
    """
    if torch.compiler.is_compiling():
        return reference_limited_silu_and_mul(x, limit)
    return _gated(x, False, limit, tuning)


def _gated(x: Tensor, is_gelu: bool, limit: float | None, tuning: Tuning) -> Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    block = min(power_of_two(size), tuning.elements)
    held = tuning.rows(block, rows)
    gated_kernel[(tiles(rows, held), tiles(size, block))](
        x,
        out,
        rows,
        x.stride(0),
        limit,
        SIZE=size,
        ROWS=held,
        BLOCK=block,
        IS_GELU=is_gelu,
        **tuning.options(tuning.silu_and_mul),
    )
    return out
