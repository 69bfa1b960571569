"""Row lists and compression plans: integers of a step, computed on the device."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.sparse.pool_rows import paged_rows
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles

EVENTS = 32
"""Events, or tokens, per program of a plan; also the rows compared with them at a time."""


@triton.jit
def window_rows_kernel(
    table,
    token_slots,
    positions,
    out,
    tokens,
    table_stride,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements `KernelTable.window_rows` with W = WINDOW (RATIO is 1), and `block_rows` with
    WINDOW = 0. Writes `out`, WIDTH entries per token.

    One program per ROWS tokens and BLOCK entries. Writes at least the output.
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    slot = tl.load(token_slots + token, mask=live, other=0).to(tl.int64)
    last = tl.load(positions + token, mask=live, other=0)
    if WINDOW > 0:
        place = tl.maximum(last - WINDOW + 1, 0)[:, None] + column[None, :]
        seen = place <= last[:, None]
    else:
        place = column[None, :] + tl.zeros([ROWS, 1], tl.int32)
        seen = place < ((last + 1) // RATIO)[:, None]
    inside = live[:, None] & (column < WIDTH)[None, :]
    row = paged_rows(table, slot[:, None], place, inside & seen, table_stride, PAGE // RATIO)
    target = out + token.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(target, tl.where(seen, row, -1).to(tl.int32), mask=inside)


@triton.jit
def state_row(table, slot, offset, place, inside, stride, PAGE: tl.constexpr, RING: tl.constexpr):
    """Return the row of the state that keeps the token at position `place`: in the ring of its
    page, or, if `table` is None, in the ring of its slot.

    The first page of the table begins at position `offset`. Undefined where not inside.
    """
    home = slot
    if table is not None:
        home = tl.load(table + slot * stride + (place - offset) // PAGE, mask=inside, other=0).to(tl.int64)
    return home * RING + place % RING


@triton.jit
def row_begin(seq_lens, lengths, row, live):
    """Return the position of a row's first token in this step, and the position after its last.
    Both are 0 where `live` is false.

    Without `lengths` a row has one token.
    """
    end = tl.load(seq_lens + row, mask=live, other=0)
    length = live.to(tl.int32)
    if lengths is not None:
        length = tl.load(lengths + row, mask=live, other=0)
    return end - length, end


@triton.jit
def events_kernel(
    slots,
    seq_lens,
    lengths,
    starts,
    table,
    state_table,
    state_offsets,
    reads,
    block_positions,
    out_rows,
    events,
    rows,
    table_stride,
    state_stride,
    PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    RING: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements `reads`, `block_positions` and `out_rows` of `KernelTable.compress_plan`, with N =
    `events`, B = `rows` and W = SPAN.

    One program per BLOCK events; each event finds its row by counting the rows that have all their
    events before it. Writes at least the output.
    """
    event = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, before = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    done = 0
    for at in range(0, rows, BLOCK):
        each = at + tl.arange(0, BLOCK)
        begin, end = row_begin(seq_lens, lengths, each, each < rows)
        slot = tl.load(slots + each, mask=each < rows, other=0)
        count = tl.where(slot > 0, end // RATIO - begin // RATIO, 0)
        after = done + tl.cumsum(count, axis=0)
        is_before = (after[None, :] <= event[:, None]) & (each < rows)[None, :]
        row += tl.sum(is_before.to(tl.int32), axis=1)
        before += tl.sum(tl.where(is_before, count[None, :], 0), axis=1)
        done += tl.sum(count, axis=0)
    live = (event < events) & (row < rows)
    begin, _ = row_begin(seq_lens, lengths, row, live)
    slot = tl.load(slots + row, mask=live, other=0).to(tl.int64)
    first, offset = row, row * 0
    if starts is not None:
        first = tl.load(starts + row, mask=live, other=0)
    if state_offsets is not None:
        offset = tl.load(state_offsets + row, mask=live, other=0)
    block = begin // RATIO + event - before
    tl.store(block_positions + event, tl.where(live, block * RATIO, 0), mask=event < events)
    out_row = paged_rows(table, slot, block, live, table_stride, PAGE // RATIO)
    tl.store(out_rows + event, tl.where(live, out_row, 0).to(out_rows.dtype.element_ty), mask=event < events)
    column = tl.arange(0, WIDE)
    source = ((block + 1) * RATIO - SPAN)[:, None] + column[None, :]
    is_held = live[:, None] & (column < SPAN)[None, :] & (source >= 0) & (source < begin[:, None])
    held = state_row(state_table, slot[:, None], offset[:, None], source, is_held, state_stride, PAGE, RING)
    found = tl.where(source < begin[:, None], -2 - held, first[:, None] + source - begin[:, None])
    found = tl.where(live[:, None] & (source >= 0), found, -1)
    target = reads + event.to(tl.int64)[:, None] * SPAN + column[None, :]
    tl.store(target, found.to(tl.int32), mask=(event < events)[:, None] & (column < SPAN)[None, :])


@triton.jit
def writes_kernel(
    slots,
    seq_lens,
    state_table,
    state_offsets,
    token_slots,
    positions,
    writes,
    tokens,
    rows,
    state_stride,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements `writes` of `KernelTable.compress_plan`, with T = `tokens` and B = `rows`.

    One program per BLOCK tokens; each token finds the row of its slot. Writes at least the output.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(token_slots + token, mask=token < tokens, other=0)
    place = tl.load(positions + token, mask=token < tokens, other=0)
    end, offset = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for at in range(0, rows, BLOCK):
        each = at + tl.arange(0, BLOCK)
        is_own = slot[:, None] == tl.load(slots + each, mask=each < rows, other=-1)[None, :]
        ends = tl.load(seq_lens + each, mask=each < rows, other=0)
        end += tl.sum(tl.where(is_own, ends[None, :], 0), axis=1)
        if state_offsets is not None:
            offsets = tl.load(state_offsets + each, mask=each < rows, other=0)
            offset += tl.sum(tl.where(is_own, offsets[None, :], 0), axis=1)
    if state_table is not None:
        end = tl.minimum(end, (place // PAGE + 1) * PAGE)
    kept = (token < tokens) & (slot > 0) & (place + RING >= end)
    found = state_row(state_table, slot.to(tl.int64), offset, place, kept, state_stride, PAGE, RING)
    tl.store(writes + token, tl.where(kept, found, 0).to(writes.dtype.element_ty), mask=token < tokens)


def window_rows(
    table: Tensor,
    token_slots: Tensor,
    positions: Tensor,
    window: int,
    page_size: int,
    out: Tensor,
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.window_rows`: write the rows of the last `window` tokens up to each
    token to `out` int32 [T, window], the oldest first, then -1.
    """
    _lists(table, token_slots, positions, window, 1, page_size, out, tuning)


def block_rows(
    table: Tensor,
    token_slots: Tensor,
    positions: Tensor,
    ratio: int,
    page_size: int,
    out: Tensor,
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.block_rows`: write the rows of the blocks of `ratio` tokens that are
    complete with each token to `out` int32 [T, W], then -1.
    """
    _lists(table, token_slots, positions, 0, ratio, page_size, out, tuning)


def _lists(
    table: Tensor,
    token_slots: Tensor,
    positions: Tensor,
    window: int,
    ratio: int,
    page_size: int,
    out: Tensor,
    tuning: Tuning,
) -> None:
    tokens, width = out.shape
    if not out.numel():
        return
    block = min(power_of_two(width), tuning.elements)
    held = tuning.rows(block, tokens)
    window_rows_kernel[(tiles(tokens, held), tiles(width, block))](
        table,
        token_slots,
        positions,
        out,
        tokens,
        table.stride(0),
        WIDTH=width,
        WINDOW=window,
        RATIO=ratio,
        PAGE=page_size,
        ROWS=held,
        BLOCK=block,
        **tuning.options(tuning.window_rows),
    )


def compress_plan(
    slots: Tensor,
    seq_lens: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    token_slots: Tensor,
    positions: Tensor,
    table: Tensor,
    state_table: Tensor | None,
    state_offsets: Tensor | None,
    page_size: int,
    ratio: int,
    ring: int,
    reads: Tensor,
    block_positions: Tensor,
    out_rows: Tensor,
    writes: Tensor,
    tuning: Tuning = Tuning(),
) -> None:
    """Implement `KernelTable.compress_plan`: write which blocks this step completes to `reads`
    int32 [N, W], `block_positions` and `out_rows` [N], and the tokens' rows in the state to
    `writes` [T].
    """
    (events, span), rows, tokens = reads.shape, slots.shape[0], writes.shape[0]
    stride = 0 if state_table is None else state_table.stride(0)
    shape = {"PAGE": page_size, "RING": ring, "BLOCK": EVENTS, **tuning.options(tuning.compress_plan)}
    if events:
        events_kernel[(tiles(events, EVENTS),)](
            slots,
            seq_lens,
            lengths,
            starts,
            table,
            state_table,
            state_offsets,
            reads,
            block_positions,
            out_rows,
            events,
            rows,
            table.stride(0),
            stride,
            RATIO=ratio,
            SPAN=span,
            WIDE=power_of_two(span),
            **shape,
        )
    if tokens:
        given = slots, seq_lens, state_table, state_offsets, token_slots, positions, writes, tokens, rows, stride
        writes_kernel[(tiles(tokens, EVENTS),)](*given, **shape)
