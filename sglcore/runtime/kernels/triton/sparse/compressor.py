"""Compresses blocks of tokens by a softmax per channel, and updates the state."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def compress_kernel(
    kv_gate,
    state,
    ape,
    reads,
    out,
    kv_stride,
    state_stride,
    SPAN: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements the result `out` of `KernelTable.compress`, with W = SPAN, C = WIDTH and SIZE = C
    * ratio / W. `keep_kernel` does the rest.

    One program per event and BLOCK channels, which adds up TOKENS tokens at a time. Reads at least
    the SPAN values and gates of each channel of an event once.
    """
    event = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total, entry = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, SPAN, TOKENS):
        token = first + tl.arange(0, TOKENS)
        read = tl.load(reads + event * SPAN + token, mask=token < SPAN, other=-1).to(tl.int64)
        # With SPAN = 2 RATIO, the second half of the channels belongs to the newer tokens.
        column = (token // RATIO * SIZE)[:, None] + channel[None, :]
        inside = (channel < SIZE)[None, :]
        is_new, is_held = (read >= 0)[:, None] & inside, (read < -1)[:, None] & inside
        new = kv_gate + (read * kv_stride)[:, None] + column
        held = state + ((-2 - read) * state_stride)[:, None] + column
        gate = tl.load(new + WIDTH, mask=is_new, other=0.0).to(tl.float32)
        gate += tl.load(held + WIDTH, mask=is_held, other=0.0).to(tl.float32)
        is_there, bias = is_new | is_held, ape + (token % RATIO * WIDTH)[:, None] + column
        gate += tl.load(bias, mask=is_there, other=0.0).to(tl.float32)
        gate = tl.where(is_there, gate, float("-inf"))
        highest = tl.maximum(best, tl.max(gate, axis=0))
        base = tl.where(highest > float("-inf"), highest, 0.0)
        weight, kept = tl.exp(gate - base[None, :]), tl.exp(best - base)
        values = tl.load(new, mask=is_new, other=0.0).to(tl.float32)
        values += tl.load(held, mask=is_held, other=0.0).to(tl.float32)
        total = total * kept + tl.sum(weight, axis=0)
        entry = entry * kept + tl.sum(weight * values, axis=0)
        best = highest
    entry = entry / tl.where(total > 0, total, 1.0)
    tl.store(out + event * SIZE + channel, narrow(entry, out.dtype.element_ty), mask=channel < SIZE)


@triton.jit
def keep_kernel(
    kv_gate,
    state,
    writes,
    tokens,
    kv_stride,
    state_stride,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements the update of the state in `KernelTable.compress`: row t of kv_gate is stored at
    state[writes[t]]. COLUMNS is 2 * C.

    One program per ROWS tokens and BLOCK columns. Reads and writes at least tokens * COLUMNS
    elements.
    """
    token, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (token < tokens)[:, None] & (column < COLUMNS)[None, :]
    row = tl.load(writes + token, mask=token < tokens, other=0).to(tl.int64)
    token = token.to(tl.int64)
    values = tl.load(kv_gate + (token * kv_stride)[:, None] + column[None, :], mask=inside, other=0.0)
    place = state + (row * state_stride)[:, None] + column[None, :]
    tl.store(place, narrow(values.to(tl.float32), state.dtype.element_ty), mask=inside)


def compress(
    kv_gate: Tensor, state: Tensor, ape: Tensor, reads: Tensor, writes: Tensor, tuning: Tuning = Tuning()
) -> Tensor:
    """Implement `KernelTable.compress`: return the N compressed blocks [N, C * ratio / W] that
    `reads` names, then store row t of kv_gate [T, 2 C] at state[writes[t]].

    One launch reads everything before the next one writes.
    """
    (tokens, columns), (events, span), (ratio, width) = kv_gate.shape, reads.shape, ape.shape
    size = width * ratio // span
    out = torch.empty(events, size, dtype=kv_gate.dtype, device=kv_gate.device)
    strides = kv_gate.stride(0), state.stride(0)
    if events:
        held = min(power_of_two(span), tuning.compress_tokens)
        block = min(power_of_two(size), max(1, tuning.compress_elements // held))
        compress_kernel[(events, tiles(size, block))](
            kv_gate,
            state,
            ape,
            reads,
            out,
            *strides,
            SPAN=span,
            RATIO=ratio,
            WIDTH=width,
            SIZE=size,
            TOKENS=held,
            BLOCK=block,
            **tuning.options(tuning.compress),
        )
    if tokens:
        block = min(power_of_two(columns), tuning.elements)
        rows = tuning.rows(block, tokens)
        keep_kernel[(tiles(tokens, rows), tiles(columns, block))](
            kv_gate,
            state,
            writes,
            tokens,
            *strides,
            COLUMNS=columns,
            ROWS=rows,
            BLOCK=block,
            **tuning.options(tuning.compress),
        )
    return out
