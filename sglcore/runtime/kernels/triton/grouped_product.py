"""Products of rows with a separate weight for each group."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.products import NARROWEST_DOT, wide_dot
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.tuning import Tuning, tiles


@triton.jit
def grouped_linear_kernel(
    x,
    weight,
    out,
    tokens,
    x_stride,
    x_group_stride,
    group_stride,
    line_stride,
    part_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    DEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Implements `KernelTable.grouped_linear`: x [tokens, GROUPS, DEEP] by weight [GROUPS, SIZE,
    DEEP] to out [tokens, GROUPS, SIZE].

    `group_stride`, `line_stride` and `part_stride` are the strides of the weight. One program per
    ROWS tokens, COLUMNS columns and group. Reads at least the weight once; above some hundred rows
    the limit is the matrix unit.
    """
    group = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column, token = row < tokens, column < SIZE, row.to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(0, DEEP, DEPTH):
        part = at + tl.arange(0, DEPTH)
        place = x + (token * x_stride + group * x_group_stride)[:, None] + part[None, :]
        rows = tl.load(place, mask=is_row[:, None] & (part < DEEP)[None, :], other=0.0)
        line = weight + group * group_stride + (column * line_stride)[None, :] + (part * part_stride)[:, None]
        total += wide_dot(rows, tl.load(line, mask=(part < DEEP)[:, None] & is_column[None, :], other=0.0))
    place = out + ((token * GROUPS + group) * SIZE)[:, None] + column[None, :]
    tl.store(place, narrow(total, out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def grouped_linear(x: Tensor, weight: Tensor, tuning: Tuning = Tuning()) -> Tensor:
    """Implement `KernelTable.grouped_linear`: x [T, G, K] and weight [G, R, K] to [T, G, R]. The
    tile is that of `Tuning.moe` for T rows per expert.
    """
    (tokens, groups, deep), size = x.shape, weight.shape[1]
    out = torch.empty(tokens, groups, size, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    tile = next(tile for tile in tuning.moe if tokens <= tile.most_rows)
    grouped_linear_kernel[(tiles(tokens, tile.rows), tiles(size, tile.columns), groups)](
        x,
        weight,
        out,
        tokens,
        x.stride(0),
        x.stride(1),
        *weight.stride(),
        GROUPS=groups,
        SIZE=size,
        DEEP=deep,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=max(NARROWEST_DOT, tile.depth_bytes // x.itemsize),
        **tuning.options(tile.config),
    )
    return out
