"""Samples one token for each row of logits by the integer race.

Results are bit for bit those of `sglcore.sampling`.

A cut is (last, ties): candidates have a smaller gap than `last`, or are among the first `ties` with
that gap. Top-k and top-p each search for theirs in two histograms, coarse and fine; the sums are
integers, so atomic additions are exact.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.race import (
    LIMIT,
    best_of,
    gaps_below,
    keyed,
    noise_of,
    number_of,
    ordered,
    row_key,
    weight_of,
)
from sglcore.runtime.kernels.triton.tuning import Option, Tuning, power_of_two, tiles
from sglcore.sampling import cutoffs, noise
from sglcore.sampling.gumbel_race import RaceTables
from sglcore.sampling.sampler import SamplingState

BIN_BITS = tl.constexpr(cutoffs.BIN_BITS)
STEPS = tl.constexpr(cutoffs.STEPS)
BINS = tl.constexpr(cutoffs.BINS)
OFF = tl.constexpr(noise.OFF)
TOP_P_BITS = tl.constexpr(noise.TOP_P_BITS)
TOP_P_MASK = tl.constexpr((1 << noise.TOP_P_BITS) - 1)
NOTHING = tl.constexpr(-(1 << 62))
"""The key of no candidate: less than every other."""


@triton.jit
def load_row(logits, row, stride, vocab, BLOCK: tl.constexpr):
    """Return the ids [BLOCK] of this program's block of a row (program_id(1)), whether each is
    below `vocab`, and its logits as float32, -inf at or past `vocab`.
    """
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    return ids, inside, tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def best_kernel(logits, best, stride, vocab, BLOCK: tl.constexpr):
    """Write to best int64 [rows, blocks] the key (`keyed`) of the first largest logit of each
    block.

    One program per row and BLOCK ids. Reads at least the logits once.
    """
    row = tl.program_id(0).to(tl.int64)
    ids, inside, wide = load_row(logits, row, stride, vocab, BLOCK)
    key = tl.where(inside, keyed(ordered(wide), ids), NOTHING)
    tl.store(best + row * tl.num_programs(1) + tl.program_id(1), tl.max(key, axis=0))


@triton.jit
def histogram_kernel(
    logits,
    best,
    scale,
    cut,
    found,
    table,
    sums,
    stride,
    vocab,
    FINE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """For each token with a smaller gap than the cut, add 1, or with WEIGHTED the token's weight,
    to its bin in sums int64 [rows, STEPS], which starts as zeros.

    `best` is that of `best_kernel`; `cut` int32 [rows, 2] is (largest kept gap, number of tokens
    kept at that gap), and only the gap is read. FINE: only tokens of the coarse bin in `found`
    int64 [rows, 3] (see `search_kernel`) are added, by the rest of the gap; otherwise `found` is
    not read. One program per row and BLOCK ids. Reads at least the logits once.
    """
    row = tl.program_id(0).to(tl.int64)
    _, inside, wide = load_row(logits, row, stride, vocab, BLOCK)
    value, _ = best_of(best, row, COUNT, PADDED)
    gap = gaps_below(wide, number_of(value), tl.load(scale + row))
    counted = inside & (gap < tl.load(cut + 2 * row))
    if FINE:
        counted = counted & ((gap >> BIN_BITS) == tl.load(found + 3 * row).to(tl.int32))
        column = gap & (STEPS - 1)
    else:
        column = gap >> BIN_BITS
    amount = weight_of(gap, table).to(tl.int64) if WEIGHTED else tl.full([BLOCK], 1, tl.int64)
    tl.atomic_add(sums + row * STEPS + column, amount, mask=counted & (amount > 0), sem="relaxed")


@triton.jit
def first_reaching(sums, column, wanted, SIZE: tl.constexpr):
    """Return the first column at which the running sum of `sums` is at least `wanted`, and the sum
    before it. The last column if no running sum is that large.

    `column` is tl.arange over `sums` (non-negative); only the first SIZE columns count.
    """
    running = tl.cumsum(sums, axis=0)
    behind = (running < wanted) & (column < SIZE)
    reached = tl.minimum(tl.sum(behind.to(tl.int32), axis=0), SIZE - 1)
    return reached, tl.sum(tl.where(column < reached, sums, 0), axis=0)


@triton.jit
def search_kernel(sums, cut, found, limits, table, FINE: tl.constexpr, WEIGHTED: tl.constexpr):
    """Search the histogram `sums` for the cut of top-k, or with WEIGHTED of top-p; `limits` is the
    `top_k` or `top_p` of `SamplingState`.

    Coarse: `found` int64 [rows, 3] gets the bin, the sum before it and the wanted sum. FINE: `cut`
    int32 [rows, 2], (largest kept gap, number of tokens kept at that gap), is narrowed. Tokens with
    the gap of the present cut are in no histogram; those that the cut keeps are added here. One
    program per row.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, STEPS)
    last, ties = tl.load(cut + 2 * row), tl.load(cut + 2 * row + 1)
    amounts = tl.load(sums + row * STEPS + column)
    limit = tl.load(limits + row).to(tl.int64)
    kept = weight_of(last, table).to(tl.int64) * ties if WEIGHTED else limit * 0
    if FINE:
        bin, before, wanted = tl.load(found + 3 * row), tl.load(found + 3 * row + 1), tl.load(found + 3 * row + 2)
        here = (column == (last & (STEPS - 1))) & (column * 0 + (last >> BIN_BITS) == bin)
        step, more = first_reaching(amounts + tl.where(here, kept, 0), column, wanted - before, STEPS)
        end = tl.minimum((bin.to(tl.int32) << BIN_BITS) + step, LIMIT)
        left = wanted - before - more
        if WEIGHTED:
            each = tl.maximum(weight_of(end, table), 1).to(tl.int64)
            left = (left + each - 1) // each
        left = tl.minimum(left, OFF).to(tl.int32)
        left = tl.where(end == last, tl.minimum(left, ties), tl.where(end < last, left, ties))
        tl.store(cut + 2 * row, tl.minimum(end, last))
        tl.store(cut + 2 * row + 1, left)
    else:
        amounts += tl.where(column == (last >> BIN_BITS), kept, 0)
        if WEIGHTED:
            total = tl.sum(amounts, axis=0)
            high, low = total >> TOP_P_BITS, total & TOP_P_MASK
            limit = high * limit + ((low * limit + TOP_P_MASK) >> TOP_P_BITS)
        bin, before = first_reaching(amounts, column, limit, BINS)
        tl.store(found + 3 * row, bin.to(tl.int64))
        tl.store(found + 3 * row + 1, before)
        tl.store(found + 3 * row + 2, limit)


@triton.jit
def ties_kernel(
    logits, best, scale, cut, ties, stride, vocab, BLOCK: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr
):
    """Write to ties int32 [rows, COUNT] how many tokens of each block have the gap of the cut,
    cut[row, 0].

    One program per row and BLOCK ids. Reads at least the logits once.
    """
    row = tl.program_id(0).to(tl.int64)
    _, inside, wide = load_row(logits, row, stride, vocab, BLOCK)
    value, _ = best_of(best, row, COUNT, PADDED)
    gap = gaps_below(wide, number_of(value), tl.load(scale + row))
    equal = inside & (gap == tl.load(cut + 2 * row))
    tl.store(ties + row * COUNT + tl.program_id(1), tl.sum(equal.to(tl.int32), axis=0))


@triton.jit
def race_kernel(
    logits,
    best,
    scale,
    cut,
    ties,
    min_p,
    seed_words,
    positions,
    hashed_ids,
    gumbel,
    drawn,
    stride,
    vocab,
    HAS_CUT: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Write to drawn int64 [rows, COUNT] the key (`keyed`) of each block's first largest noise -
    gap, or NOTHING without a candidate.

    `best`, `cut` and `ties` are those of the kernels before; `cut` and `ties` are read with HAS_CUT
    only, `min_p` with HAS_MIN_P only. One program per row and BLOCK ids. Reads at least the logits
    once.
    """
    row = tl.program_id(0).to(tl.int64)
    ids, inside, wide = load_row(logits, row, stride, vocab, BLOCK)
    value, _ = best_of(best, row, COUNT, PADDED)
    gap = gaps_below(wide, number_of(value), tl.load(scale + row))
    kept = inside & (gap < LIMIT)
    if HAS_CUT:
        last, allowed = tl.load(cut + 2 * row), tl.load(cut + 2 * row + 1)
        part = tl.arange(0, PADDED)
        earlier = tl.sum(tl.load(ties + row * COUNT + part, mask=part < tl.program_id(1), other=0), axis=0)
        equal = (inside & (gap == last)).to(tl.int32)
        late = earlier + tl.cumsum(equal, axis=0) > allowed
        kept = kept & (gap <= last) & ((equal == 0) | (late == 0))
    if HAS_MIN_P:
        kept = kept & (gap <= tl.load(min_p + row))
    first, second = row_key(seed_words, positions, row)
    score = noise_of(tl.load(hashed_ids + ids, mask=inside, other=0), first, second, gumbel) - gap
    key = tl.where(kept, keyed(score, ids), NOTHING)
    tl.store(drawn + row * COUNT + tl.program_id(1), tl.max(key, axis=0))


@triton.jit
def pick_kernel(best, drawn, greedy, tokens, bad, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Write the results of `KernelTable.draw`: `tokens` int32 and `bad` bool [rows], from the
    blocks' keys in `best` and `drawn`.

    The token is 0 in a bad row, the id of the first largest logit in a greedy row. One program per
    row.
    """
    row = tl.program_id(0).to(tl.int64)
    value, first = best_of(best, row, COUNT, PADDED)
    _, token = best_of(drawn, row, COUNT, PADDED)
    is_bad = (value >= ordered_infinity()) | (value <= -ordered_infinity() - 1)
    token = tl.where(tl.load(greedy + row) != 0, first, token)
    tl.store(tokens + row, tl.where(is_bad, 0, token))
    tl.store(bad + row, is_bad)


@triton.jit
def ordered_infinity():
    """Return `ordered` of infinity. That of minus infinity is its bitwise complement."""
    return 0x7F800000


@dataclass(frozen=True, slots=True)
class DrawKernels:
    """The buffers of one draw and the launches of its kernels.

    `best` int64 [B, blocks] is that of `best_kernel`, for blocks of `block` ids; every kernel is
    launched with `options`.
    """

    logits: Tensor
    state: SamplingState
    tables: RaceTables
    best: Tensor
    block: int
    options: dict[str, Option]

    @property
    def grid(self) -> tuple[int, int]:
        """The grid (row, block)."""
        return self.logits.shape[0], self.best.shape[1]

    @property
    def sizes(self) -> dict[str, int]:
        """The size parameters of every kernel over blocks, by name: BLOCK, COUNT and PADDED."""
        return {"BLOCK": self.block, "COUNT": self.best.shape[1], "PADDED": power_of_two(self.best.shape[1])}

    def narrow(self, cut: Tensor, limits: Tensor, weighted: bool) -> None:
        """Narrow `cut` int32 [rows, 2], in place, to the tokens that `limits` keeps: `top_k` of the
        state, or `top_p` if weighted.

        The search has two steps: coarse bins, then the gaps in the bin that was found.
        """
        rows, (_, vocab) = self.grid[0], self.logits.shape
        sums = cut.new_zeros((2, rows, cutoffs.STEPS), dtype=torch.int64)
        found = sums.new_empty((rows, 3))
        given = self.best, self.state.scale, cut, found, self.tables.weight
        for is_fine, level in enumerate(sums):
            kind = {"FINE": bool(is_fine), "WEIGHTED": weighted}
            histogram_kernel[self.grid](
                self.logits, *given, level, self.logits.stride(0), vocab, **kind, **self.sizes, **self.options
            )
            search_kernel[(rows,)](level, cut, found, limits, self.tables.weight, **kind, **self.options)

    def race(self, cut: Tensor | None) -> Tensor:
        """Return the best key of each block, int64 [rows, blocks]. `cut` None: no top-k and no
        top-p.
        """
        state, drawn = self.state, torch.empty_like(self.best)
        ties = drawn
        sizes = (self.logits.stride(0), self.logits.shape[1])
        given = self.best, state.scale, drawn if cut is None else cut
        if cut is not None:
            ties = torch.empty(drawn.shape, dtype=torch.int32, device=drawn.device)
            ties_kernel[self.grid](self.logits, *given, ties, *sizes, **self.sizes, **self.options)
        race_kernel[self.grid](
            self.logits,
            *given,
            ties,
            state.greedy if state.min_p is None else state.min_p,
            state.seed_words,
            state.positions,
            self.tables.hashed_ids,
            self.tables.gumbel,
            drawn,
            *sizes,
            HAS_CUT=cut is not None,
            HAS_MIN_P=state.min_p is not None,
            **self.sizes,
            **self.options,
        )
        return drawn


def draw(logits: Tensor, state: SamplingState, tables: RaceTables, tuning: Tuning = Tuning()) -> tuple[Tensor, Tensor]:
    """Implement `KernelTable.draw`: tokens int32[B] and bad bool[B] of logits float[B, V]. Does not
    wait.

    Reads the logits at least twice, five times with top-k or top-p, and seven times with both; from
    the cache after the first read, if they fit.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    bad = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if not rows:
        return tokens, bad
    block = min(tuning.draw_tokens, power_of_two(vocab))
    options = tuning.options(tuning.draw)
    best = torch.empty(rows, tiles(vocab, block), dtype=torch.int64, device=logits.device)
    work = DrawKernels(logits, state, tables, best, block, options)
    best_kernel[work.grid](logits, best, logits.stride(0), vocab, BLOCK=block, **options)
    cut = None
    if state.top_k is not None or state.top_p is not None:
        cut = tokens.new_empty((rows, 2))
        cut[:, 0].fill_(noise.LIMIT)
        cut[:, 1].fill_(noise.OFF)
        if state.top_k is not None:
            work.narrow(cut, state.top_k, weighted=False)
        if state.top_p is not None:
            work.narrow(cut, state.top_p, weighted=True)
    drawn = work.race(cut)
    pick_kernel[(rows,)](
        best, drawn, state.greedy, tokens, bad, COUNT=best.shape[1], PADDED=power_of_two(best.shape[1]), **options
    )
    return tokens, bad
