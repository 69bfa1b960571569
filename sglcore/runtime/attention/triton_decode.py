"""Decode attention over pages in Triton.

The tokens of each request are cut into chunks, and a fixed number of programs takes the chunks of
all requests in turn, so a step takes as long as its tokens, however they are spread over requests.
The number of chunks follows from the lengths, which are read on the device: one launch serves every
batch of its size. A second kernel merges the chunks of a request in their order.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.triton_blocks import is_seen, load_cells
from sglcore.runtime.kernels.triton.products import NARROWEST_DOT
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.softmax import LOG2_E, begin, merge_parts, take_in
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two

CHUNK_SHARE = 8
"""The smallest chunk has ceil(CHUNK_SHARE * requests * KV heads / `Tuning.programs`) tiles, at most
MOST_TILES, rounded down to a power of two.
"""
MOST_TILES = 32
"""Maximum number of tiles of the smallest chunk (`Chunks.least`)."""
FEWEST = 4
"""Number of chunks per request that `Tuning.most_parts` always allows, whatever the number of
requests.
"""
FEWEST_ROWS = 16
"""Rows up to which all batches have the same compiled kernel; beyond, each power of two has its
own."""
SIZES = ("rows", "least", "most")
"""Names of the arguments for which Triton does not specialise the compiled code."""


@triton.jit
def span_of(seq_len, WINDOW: tl.constexpr):
    """Return how many of `seq_len` tokens a row attends to: the last WINDOW ones (0: all)."""
    return tl.minimum(seq_len, WINDOW) if WINDOW else seq_len


@triton.jit
def chunk_of(span, least, most, TOKENS: tl.constexpr):
    """Return the number of tokens in a chunk of a row that attends to `span` tokens: a multiple of
    TOKENS, as `least` is.

    At least `least`, and large enough that the row has at most `most` chunks. It depends on the row
    alone.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(span, most), TOKENS) * TOKENS, least)


@triton.jit
def chunks_of(span, least, most, TOKENS: tl.constexpr):
    """Return the number of chunks of a row: one even if it has no token, as its output is zero."""
    return tl.maximum(tl.cdiv(span, chunk_of(span, least, most, TOKENS)), 1)


@triton.jit
def chunk_ends(seq_lens, rows, least, most, BLOCK_ROWS: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Return the running sum of the rows' chunks: for each row, the chunks of it and of all rows
    before it, int32 [BLOCK_ROWS]. Entries from `rows` on repeat the total.
    """
    row = tl.arange(0, BLOCK_ROWS)
    spans = span_of(tl.load(seq_lens + row, mask=row < rows, other=0), WINDOW)
    return tl.cumsum(tl.where(row < rows, chunks_of(spans, least, most, TOKENS), 0), axis=0)


@triton.jit
def bounds_of(seq_len, chunk, least, most, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Return the position of the first token of a row's chunk number `chunk`, and the one after its
    last.
    """
    span = span_of(seq_len, WINDOW)
    share = chunk_of(span, least, most, TOKENS)
    start = seq_len - span + chunk * share
    return start, tl.minimum(start + share, seq_len)


@triton.jit
def store_part(parts, weights, part, best, total, mean, member, GROUP: tl.constexpr, DIM: tl.constexpr, column):
    """Store the results `mean` [QUERIES, BLOCK_D] of a chunk, divided by `total` already, in
    `parts`, and their log2 weights in `weights`, for the members below GROUP.

    `part` int [QUERIES] is the index of (row, head, chunk), `best` and `total` are the running
    maximum (base 2) and sum.
    """
    # Without a token and a sink `best` is still -inf, and so is the weight.
    tl.store(weights + part, best + tl.log2(total), mask=member < GROUP)
    mine = (member < GROUP)[:, None] & (column < DIM)[None, :]
    tl.store(parts + part[:, None] * DIM + column[None, :], mean, mask=mine)


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    slots,
    seq_lens,
    visible,
    sinks,
    out,
    parts,
    weights,
    rows,
    least,
    most,
    q_stride,
    cell_stride,
    table_stride,
    scale,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend one query per row to the KV slots of its request; arguments are those of
    `attend_singles`, `scale` includes log2(e).

    A row of one chunk is written to out [rows, heads, DIM], a chunk of another row to parts [rows,
    heads, most, DIM], with its log2 weight in weights [rows, heads, most]. Programs take the items
    (chunk of a row, KV head) in turn, first all KV heads of a chunk. Reads at least 2 * seq_len *
    kv_heads * DIM elements of the cache for each row; the rest is small.
    """
    ends = chunk_ends(seq_lens, rows, least, most, BLOCK_ROWS, TOKENS, WINDOW)
    member, column = tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
    mine = (member < GROUP)[:, None] & (column < DIM)[None, :]
    for item in range(tl.program_id(0), tl.max(ends, axis=0) * KV_HEADS, tl.num_programs(0)):
        index, kv_head = item // KV_HEADS, item % KV_HEADS
        row = tl.sum((ends <= index).to(tl.int32), axis=0).to(tl.int64)
        chunk = index - tl.max(tl.where(ends <= index, ends, 0), axis=0)
        seq_len, slot = tl.load(seq_lens + row), tl.load(slots + row).to(tl.int64)
        start, end = bounds_of(seq_len, chunk, least, most, TOKENS, WINDOW)
        head = kv_head * GROUP + member
        query = tl.load(q + row * q_stride + (head * DIM)[:, None] + column[None, :], mask=mine, other=0.0)
        seen = tl.load(visible + row) if visible is not None else -1
        best, total = begin(sinks, head, member < tl.where(chunk == 0, GROUP, 0), QUERIES)
        mean = tl.zeros([QUERIES, BLOCK_D], tl.float32)
        for token in range(start, end, TOKENS):
            at = token + tl.arange(0, TOKENS)
            inside = at < end
            if visible is not None:
                inside = inside & is_seen(seen, seq_len - 1 - at)
            keys, values = load_cells(
                k_cache, v_cache, page_table, slot, at, inside, kv_head, cell_stride, table_stride, PAGE, DIM, BLOCK_D
            )
            best, total, mean = take_in(query, keys, values, inside[None, :], scale, best, total, mean, SOFTCAP)
        total = tl.where(total > 0, total, 1.0)
        mean, line = mean / total[:, None], row * (KV_HEADS * GROUP) + head
        if chunks_of(span_of(seq_len, WINDOW), least, most, TOKENS) == 1:
            tl.store(out + line[:, None] * DIM + column[None, :], narrow(mean, out.dtype.element_ty), mask=mine)
        else:
            store_part(parts, weights, line * most + chunk, best, total, mean, member, GROUP, DIM, column)


@triton.jit(do_not_specialize=SIZES[1:])
def merge_chunks_kernel(
    parts,
    weights,
    seq_lens,
    out,
    least,
    most,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Write to `out` the mean of the results that `decode_kernel` left in `parts`, by their log2
    weights, for rows of several chunks.

    One program per row and head. Reads at least the row's chunks * DIM float32 for each head;
    nothing for a row of one chunk.
    """
    line = tl.program_id(0).to(tl.int64)
    count = chunks_of(span_of(tl.load(seq_lens + line // HEADS), WINDOW), least, most, TOKENS)
    if count > 1:
        merge_parts(parts, weights, out, line, most, count, DIM, BLOCK_D, BLOCK_S)


@dataclass(frozen=True, slots=True)
class Chunks:
    """How decode attention cuts requests into chunks.

    A chunk has at least `least` tokens, a multiple of a tile's tokens, and a request has at most
    `most` chunks: the chunks of a longer request are longer.
    """

    least: int
    most: int


def chunks_for(tuning: Tuning, rows: int, kv_heads: int, longest: int) -> Chunks:
    """Return chunks that keep the device busy for `rows` requests of up to `longest` tokens.

    Few requests have small chunks, so that short ones fill the device; many have large ones, which
    cost less. Computed from upper bounds, never from lengths.
    """
    rows = max(1, rows)
    tiles_each = min(-(-CHUNK_SHARE * rows * kv_heads // tuning.programs), MOST_TILES)
    least = tuning.decode_tokens << (tiles_each.bit_length() - 1)
    most = max(tuning.most_parts // rows, FEWEST)
    return Chunks(least, max(1, min(most, tuning.most_splits, -(-longest // least))))


def attend_singles(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    chunks: Chunks,
    layer: Attention,
    tuning: Tuning,
    visible: Tensor | None = None,
) -> None:
    """Attend one query per row and write `out`, contiguous, of q's shape.

    q [R, heads * dim], caches [cells, kv_heads, dim], `page_table` int32 [slots, pages], `slots`
    (request slots) and `seq_lens` int [R], `visible` as in a batch. Window, softcap, sinks and
    scale are those of `layer`. A row of length 0 becomes zero. Does not wait.
    """
    rows, kv_heads, dim = q.shape[0], k_cache.shape[1], k_cache.shape[2]
    if not rows:
        return
    heads, block = q.shape[1] // dim, max(power_of_two(dim), NARROWEST_DOT)
    tokens = tuning.fitting(tuning.decode_tokens, block * k_cache.itemsize)
    parts, weights = out, out
    if chunks.most > 1:
        parts = out.new_empty(rows, heads, chunks.most, dim, dtype=torch.float32)
        weights = parts.new_empty(rows, heads, chunks.most)
    decode_kernel[(min(tuning.decode_programs, rows * kv_heads * chunks.most),)](
        q,
        k_cache,
        v_cache,
        page_table,
        slots,
        seq_lens,
        visible,
        layer.sinks,
        out,
        parts,
        weights,
        rows,
        chunks.least,
        chunks.most,
        q.stride(0),
        k_cache.stride(0),
        page_table.stride(0),
        layer.scaling * LOG2_E.value,
        PAGE=page_size,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_D=block,
        QUERIES=max(power_of_two(heads // kv_heads), NARROWEST_DOT),
        TOKENS=tokens,
        BLOCK_ROWS=max(power_of_two(rows), FEWEST_ROWS),
        WINDOW=layer.sliding_window or 0,
        SOFTCAP=layer.softcap,
        **tuning.options(tuning.decode),
    )
    if chunks.most > 1:
        _merge(parts, weights, seq_lens, out, chunks, tokens, layer, tuning)


def _merge(
    parts: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    chunks: Chunks,
    tokens: int,
    layer: Attention,
    tuning: Tuning,
) -> None:
    rows, heads, _, dim = parts.shape
    merge_chunks_kernel[(rows * heads,)](
        parts,
        weights,
        seq_lens,
        out,
        chunks.least,
        chunks.most,
        HEADS=heads,
        DIM=dim,
        BLOCK_D=power_of_two(dim),
        BLOCK_S=power_of_two(chunks.most),
        TOKENS=tokens,
        WINDOW=layer.sliding_window or 0,
        **tuning.options(tuning.merge),
    )
