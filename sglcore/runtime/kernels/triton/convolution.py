"""Causal depthwise convolution over a token and the tokens before it, with a tail for each slot."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.rounding import narrow, rounded
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def causal_conv_kernel(
    x,
    weight,
    bias,
    tails,
    slots,
    starts,
    lengths,
    targets,
    out,
    x_stride,
    SIZE: tl.constexpr,
    TAPS: tl.constexpr,
    RAGGED: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements `KernelTable.causal_conv` with C = SIZE and W = TAPS; `out` is its result.

    RAGGED: `starts` and `lengths` are read, and `out` starts as zeros; otherwise row r is token r.
    `targets` are `slots` if the tails are updated in place. One program per row, TOKENS of its
    tokens and BLOCK channels; only the program of a row's first tokens reads its tail, and writes
    it afterwards. Reads and writes at least tokens * SIZE elements, and rows * (TAPS - 1) * SIZE of
    tails.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot, target = tl.load(slots + row).to(tl.int64), tl.load(targets + row)
    start = tl.load(starts + row).to(tl.int64) if RAGGED else row
    length = tl.load(lengths + row) if RAGGED else tl.full((), 1, tl.int32)
    place, channels = tile * TOKENS + tl.arange(0, TOKENS), column < SIZE
    # A padding row has no channels.
    live = (column < tl.where(slot > 0, SIZE, 0))[None, :] & (place < length)[:, None]
    rows, tail = x + start * x_stride, tails + slot * ((TAPS - 1) * SIZE) + column
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source = place + (tap - TAPS + 1)
        new = tl.load(
            rows + source[:, None] * x_stride + column[None, :], mask=live & (source >= 0)[:, None], other=0.0
        )
        known = tail[None, :] + (place + tap)[:, None] * SIZE
        old = tl.load(known, mask=live & (source < 0)[:, None], other=0.0)
        gain = tl.load(weight + tap * SIZE + column, mask=channels, other=0.0).to(tl.float32)
        total += (new.to(tl.float32) + old.to(tl.float32)) * gain[None, :]
    if BIAS:
        total += tl.load(bias + column, mask=channels, other=0.0).to(tl.float32)[None, :]
    total = rounded(total, out.dtype.element_ty)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    written = live if RAGGED else channels[None, :] & (place < length)[:, None]
    result = tl.where(live, total, 0.0)
    tl.store(
        out + (start + place)[:, None] * SIZE + column[None, :], narrow(result, out.dtype.element_ty), mask=written
    )
    tl.debug_barrier()
    kept = column < tl.where((slot > 0) & (target > 0) & (tile == 0), SIZE, 0)
    to = tail + (target - slot) * ((TAPS - 1) * SIZE)
    for place_in_tail in tl.static_range(TAPS - 1):
        source = length - (TAPS - 1) + place_in_tail
        known = tail + (length + place_in_tail) * SIZE
        latest = tl.where(source >= 0, rows + source * x_stride + column, known)
        tl.store(to + place_in_tail * SIZE, tl.load(latest, mask=kept, other=0.0), mask=kept)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    tails: Tensor,
    slots: Tensor,
    starts: Tensor | None,
    lengths: Tensor | None,
    targets: Tensor | None = None,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.causal_conv`: x [T, C] to a new tensor [T, C]; `tails` [S, W - 1, C]
    are read at the rows' slots and updated in place (with `targets`, at those).
    """
    tokens, size = x.shape
    is_ragged = starts is not None
    out = torch.zeros((tokens, size), dtype=x.dtype, device=x.device) if is_ragged else x.new_empty((tokens, size))
    if not tokens:
        return out
    held = tuning.conv_tokens if is_ragged else 1
    block = min(power_of_two(size), tuning.conv_channels)
    causal_conv_kernel[(slots.shape[0], tiles(tokens, held) if is_ragged else 1, tiles(size, block))](
        x,
        weight,
        weight if bias is None else bias,
        tails,
        slots,
        starts,
        lengths,
        slots if targets is None else targets,
        out,
        x.stride(0),
        SIZE=size,
        TAPS=weight.shape[0],
        RAGGED=is_ragged,
        BIAS=bias is not None,
        SILU=silu,
        TOKENS=held,
        BLOCK=block,
        **tuning.options(tuning.causal_conv),
    )
    return out
