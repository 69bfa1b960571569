"""Test inputs for the entries of DeepSeek's attention, as in `kernel_inputs.py`, with paged rows
that lists name. A pool row that no list names holds NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.conformance.inputs.kernel_inputs import Draw, Inputs, rows_of_pool
from sglcore.runtime.kernels.row_codec import RowCodec

PAGE = 8
ROTATED = 8
POSITIONS = 60
PUBLISHED = ((576, 1, False), (512, 2, True), (512, 1, True))
"""(elements of a row, number of lists, whether there are sinks) of DeepSeek-V3.2 and of V4,
whose layers with a window only have one list."""
PUBLISHED_TOKENS = MappingProxyType({0: 0, 3: 2})
"""Tokens to run in those sizes, by the case's number of tokens; few, because they take time where
kernels are interpreted."""
MOST_TOKENS = 5
"""Largest number of tokens for entries with streams; more would test nothing new."""


@dataclass(frozen=True, slots=True)
class Paged:
    """Tokens of requests in pages of `PAGE` rows. `rows`: (slots, starts, lengths) of the requests;
    `seq_lens`: their tokens so far; `token_slots`, `positions`: slot and position of each token of
    this step; `table`: the pages of each slot; `pages`: the number of pages. Padding has slot 0,
    and all its pages are page 0."""

    rows: tuple[Tensor, Tensor | None, Tensor | None]
    seq_lens: Tensor
    token_slots: Tensor
    positions: Tensor
    table: Tensor
    pages: int


def _paged(drawn: Draw, tokens: int) -> Iterator[Paged]:
    """Yield two batches of at most `tokens` tokens: one token for each row, then several; most
    requests have tokens before this step."""
    for count, size, rows in rows_of_pool(drawn, tokens):
        slots, starts, lengths = rows
        before = drawn.ints(0, 27, len(slots))
        seq_lens = before + (1 if lengths is None else lengths)
        seq_lens[slots == 0] = PAGE
        own, positions = (torch.zeros(count, dtype=torch.int32, device="cpu") for _ in range(2))
        for row, slot in enumerate(slots.tolist()):
            first, last = (row, row + 1) if starts is None else (int(starts[row]), int(starts[row] + lengths[row]))  # pyright: ignore[reportOptionalSubscript]
            if slot:
                own[first:last] = slot
                positions[first:last] = torch.arange(int(before[row]), int(seq_lens[row]), device="cpu")
        wide = POSITIONS // PAGE + 1
        table = (drawn.permutation(size * wide) + 1).view(size, wide).int()
        table[0] = 0
        yield Paged(rows, seq_lens.int(), own, positions, table, size * wide + 1)


def _cache(rotated: int = ROTATED) -> Tensor:
    angles = torch.arange(POSITIONS, device="cpu")[:, None] * torch.linspace(0.01, 1, rotated // 2, device="cpu")
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _codecs(drawn: Draw) -> tuple[tuple[int, RowCodec | None], ...]:
    """Return (elements or bytes of a row, codec) of plain rows (codec None), and of rows in eight
    bits. In the second the last group is cut, and a row ends with bytes that align the next row."""
    return (24, None), (44, RowCodec(44, exact=8, group=16, float8=drawn.float8))


def _pool(drawn: Draw, rows: int, size: int, named: Tensor, codec: RowCodec | None) -> Tensor:
    """Return a random pool [rows, size]; with a codec, the encoded bytes of one. Rows with an index
    that is not in `named` hold NaN."""
    values = drawn.values(rows, size)
    values = values if codec is None else codec.encode(values)
    nobody = torch.full_like(values, math.nan) if codec is None else codec.unwritten.repeat(rows, 1)
    nobody[named] = values[named]
    return nobody


def _out_rows(drawn: Draw, tokens: int, rows: int) -> Tensor:
    """Return `tokens` distinct pool rows between 1 and `rows` - 1, int64 [tokens], except that the
    middle one is row 0, as for padding."""
    found = drawn.permutation(rows - 1)[:tokens] + 1
    found[tokens // 2 : tokens // 2 + 1] = 0
    return found


def rope_tail(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.rope_tail`, for `tokens` rows drawn from `drawn`:
    forward with a norm, rotated in part; inverse without a norm, rotated whole. `strided`: rows are
    slices of wider rows."""
    for size, eps, is_inverse in ((24, 1e-6, False), (ROTATED, None, True)):
        heads = drawn.rows(tokens, 3 * size, strided).unflatten(1, (3, size))
        yield heads, drawn.ints(0, POSITIONS, tokens), _cache(), eps, is_inverse


def norm_rope_store(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.norm_rope_store`, for `tokens` rows drawn from
    `drawn`: a norm of the part that is not rotated, and a norm of the whole row. `strided`: rows
    are slices of wider rows."""
    for (size, codec), normed in zip(_codecs(drawn), (16, 44), strict=True):
        rows = _pool(drawn, 40, size, drawn.permutation(0), codec)
        where = drawn.ints(0, POSITIONS, tokens), _cache(), rows, _out_rows(drawn, tokens, 40)
        yield drawn.rows(tokens, size, strided), drawn.values(normed).float(), 1e-6, *where, codec


def index_key_store(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.index_key_store`, for `tokens` rows drawn from
    `drawn`: plain rows, and rows in eight bits. `strided`: rows are slices of wider rows."""
    for size, codec in _codecs(drawn):
        gain, shift = drawn.values(size).float(), drawn.values(size).float()
        rows = _pool(drawn, 40, size, drawn.permutation(0), codec)
        where = drawn.ints(0, POSITIONS, tokens), _cache(), rows, _out_rows(drawn, tokens, 40)
        yield drawn.rows(tokens, size, strided), gain, shift, 1e-6, *where, codec


def window_rows(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.window_rows`, for at most `tokens` rows drawn from
    `drawn`: windows within a page, and over several. `strided` has no effect."""
    for paged, width in zip(_paged(drawn, tokens), (5, 19), strict=True):
        out = torch.full((len(paged.positions), width), -7, dtype=torch.int32, device="cpu")
        yield paged.table, paged.token_slots, paged.positions, width, PAGE, out


def block_rows(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.block_rows`, for at most `tokens` rows drawn from
    `drawn`: one block in a page, and several. `strided` has no effect."""
    for paged, ratio in zip(_paged(drawn, tokens), (PAGE, 4), strict=True):
        width = paged.table.shape[1] * PAGE // ratio
        out = torch.full((len(paged.positions), width), -7, dtype=torch.int32, device="cpu")
        yield paged.table, paged.token_slots, paged.positions, ratio, PAGE, out


def compress_plan(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.compress_plan`, for at most `tokens` rows drawn
    from `drawn`: overlapping blocks with states in pages, which may begin after the first page; and
    separate blocks with states by slot. There is room for more events than occur. `strided` has no
    effect."""
    for paged, (ratio, span) in product(_paged(drawn, tokens), ((4, 8), (PAGE, PAGE))):
        slots, starts, lengths = paged.rows
        count = len(paged.positions)
        offsets = (paged.seq_lens - (1 if lengths is None else lengths) - span).clamp(min=0) // PAGE * PAGE
        by_page = (paged.table.flip(1), offsets) if span > ratio else (None, None)
        events = min(count, count // ratio + len(slots))
        out = [torch.full(shape, -7, dtype=torch.int32, device="cpu") for shape in ((events, span), (events,))]
        out += [torch.full((size,), -7, dtype=torch.int64, device="cpu") for size in (events, count)]
        tokens_of = paged.token_slots, paged.positions, paged.table
        yield slots, paged.seq_lens, lengths, starts, *tokens_of, *by_page, PAGE, ratio, span, *out


def compress(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.compress`, for `tokens` rows drawn from `drawn`:
    blocks that read tokens of this step, rows of the state (the call then overwrites a few of
    them), and nothing. `strided`: rows are slices of wider rows."""
    for ratio, span, size in ((4, 8, 24), (3, 3, 12)):
        state = _pool(drawn, 50, 2 * size, drawn.permutation(25), None).float()
        held = -2 - drawn.ints(0, 25, tokens, span)
        reads = torch.where(drawn.ints(0, 2, tokens, span) > 0, held, drawn.ints(0, max(tokens, 1), tokens, span))
        absent = drawn.ints(0, span + 1, tokens, 1)
        absent[2::3] = span
        reads[torch.arange(span, device="cpu") < absent] = -1
        ape, writes = drawn.values(ratio, size).float(), _out_rows(drawn, tokens, 50)
        yield drawn.rows(tokens, 2 * size, strided), state, ape, reads, writes


def index_logits(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.index_logits`, for at most `tokens` rows drawn from
    `drawn`: weights of both signs; more columns than any token has rows. `strided`: rows are slices
    of wider rows."""
    for paged, (size, codec) in zip(_paged(drawn, tokens), _codecs(drawn), strict=True):
        count, lens = len(paged.positions), paged.positions + (paged.token_slots > 0).int()
        q = drawn.rows(count, 3 * size, strided).unflatten(1, (3, size))
        keys = _pool(drawn, paged.pages * PAGE, size, _held(paged, lens), codec)
        yield q, drawn.values(count, 3), keys, paged.table, paged.token_slots, lens, PAGE, 0.2, POSITIONS, codec


def _held(paged: Paged, lens: Tensor) -> Tensor:
    """Return the pool rows of the first lens[t] positions of the request of every token t, int64,
    one after the other."""
    pairs = zip(paged.token_slots.tolist(), lens.tolist(), strict=True)
    found = [paged.table[slot, place // PAGE] * PAGE + place % PAGE for slot, size in pairs for place in range(size)]
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def index_top_k(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.index_top_k`, for at most `tokens` rows drawn from
    `drawn`: fewer rows than `k`, and more; no two logits of a token are equal. `strided` has no
    effect."""
    for paged, k in zip(_paged(drawn, tokens), (4, 11), strict=True):
        lens = paged.positions + (paged.token_slots > 0).int()
        ranks = [drawn.permutation(POSITIONS) for _ in lens]
        logits = (torch.stack(ranks) if ranks else drawn.values(0, POSITIONS)).float() - 20
        logits[torch.arange(POSITIONS, device="cpu") >= lens.unsqueeze(1)] = -math.inf
        yield logits, lens, paged.table, paged.token_slots, PAGE, k


def sparse_mqa(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.sparse_mqa`, for at most `tokens` rows drawn from
    `drawn`: one list, and two with sinks; some tokens choose nothing. Then the numbers of heads and
    elements of the published models. `strided`: rows are slices of wider rows."""
    for (size, codec), value_size, lists in zip(_codecs(drawn), (16, 44), (1, 2), strict=True):
        yield _attention(drawn, tokens, (3, size, value_size), lists, codec, strided, lists == 2)
    for size, lists, has_sinks in PUBLISHED if tokens in PUBLISHED_TOKENS else ():
        yield _attention(drawn, PUBLISHED_TOKENS[tokens], (64, size, 512), lists, None, strided, has_sinks)


def _attention(
    drawn: Draw,
    tokens: int,
    sizes: tuple[int, int, int],
    lists: int,
    codec: RowCodec | None,
    strided: bool,
    has_sinks: bool,
) -> tuple[Any, ...]:
    """Return the arguments of one call of `sparse_mqa` for `tokens` tokens; `sizes`: heads,
    elements of a row, elements of a value; `lists`: 1, or 2 with sinks."""
    heads, size, value_size = sizes
    q = drawn.rows(tokens, heads * size, strided).unflatten(1, (heads, size))
    given: list[Tensor | None] = []
    for width in (7, 5)[:lists]:
        chosen = _chosen(drawn, tokens, width)
        given += [_pool(drawn, 40, size, chosen[chosen >= 0].long(), codec), chosen]
    given += [None, None] if lists == 1 else []
    sinks = drawn.values(heads).float() if has_sinks else None
    return q, *given, sinks, 1.5 * size**-0.5, value_size, codec


def _chosen(drawn: Draw, tokens: int, width: int) -> Tensor:
    rows = [drawn.permutation(39)[:width] + 1 for _ in range(tokens)]
    chosen = torch.stack(rows).int() if rows else drawn.ints(1, 40, 0, width)
    sizes = drawn.ints(0, width + 1, tokens, 1)
    sizes[1::3] = 0
    return chosen.masked_fill(torch.arange(width, device="cpu") >= sizes, -1)


def paged_mqa(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.paged_mqa`, for at most `tokens` rows drawn from
    `drawn`: plain rows, and rows in eight bits. `strided`: rows are slices of wider rows."""
    for paged, (size, codec), value_size in zip(_paged(drawn, tokens), _codecs(drawn), (16, 44), strict=True):
        lens = paged.positions + (paged.token_slots > 0).int()
        q = drawn.rows(len(lens), 3 * size, strided).unflatten(1, (3, size))
        rows = _pool(drawn, paged.pages * PAGE, size, _held(paged, lens), codec)
        yield q, rows, paged.table, paged.token_slots, lens, PAGE, 0.3, value_size, codec


def grouped_linear(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.grouped_linear`, for `tokens` rows drawn from
    `drawn`. With `strided`, the weight is a transposed view too."""
    weight = drawn.values(3, 40, 17).transpose(1, 2) if strided else drawn.values(3, 17, 40)
    yield drawn.rows(tokens, 3 * 40, strided).unflatten(1, (3, 40)), weight * 0.15


def hc_pre(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.hc_pre`, for at most `tokens` rows drawn from
    `drawn`: four streams, and three. `strided`: rows are slices of wider rows."""
    tokens = min(tokens, MOST_TOKENS)
    for streams, iters in ((4, 3), (3, 2)):
        outputs, scale = (2 + streams) * streams, torch.tensor([0.7, 1.1, 1.6], device="cpu")
        fn, base = drawn.values(outputs, streams * 24).float() * 0.15, drawn.values(outputs).float() / 2
        yield _streams(drawn, tokens, streams, strided), fn, base, scale, 1e-6, 1e-2, iters


def _streams(drawn: Draw, tokens: int, streams: int, strided: bool) -> Tensor:
    return drawn.rows(tokens, streams * 24, strided).unflatten(1, (streams, 24))


def hc_post(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.hc_post`, for at most `tokens` rows drawn from
    `drawn`. The mix of streams is not symmetric. `strided`: rows are slices of wider rows."""
    tokens = min(tokens, MOST_TOKENS)
    post, comb = drawn.values(tokens, 4).float(), drawn.values(tokens, 4, 4).float() / 2
    yield drawn.rows(tokens, 24, strided), _streams(drawn, tokens, 4, strided), post, comb


def hc_head(drawn: Draw, tokens: int, strided: bool) -> Inputs:
    """Yield tuples of arguments of `KernelTable.hc_head`, for at most `tokens` rows drawn from
    `drawn`: four streams. `strided`: rows are slices of wider rows."""
    tokens = min(tokens, MOST_TOKENS)
    fn, scale = drawn.values(4, 96).float() * 0.15, torch.tensor([0.8], device="cpu")
    yield _streams(drawn, tokens, 4, strided), fn, drawn.values(4).float(), scale, 1e-6, 1e-2
