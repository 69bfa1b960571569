"""The indexer of sparse attention.

A score for each row of a request, and the rows with the highest scores.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.kernels.triton.products import NARROWEST_DOT, wide_dot
from sglcore.runtime.kernels.triton.race import ordered
from sglcore.runtime.kernels.triton.sparse.pool_rows import load_elements, load_heads, paged_rows, read_form_of
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles

LOWEST = tl.constexpr(-(1 << 31))
"""Less than `ordered` of every number."""


@triton.jit
def index_logits_kernel(
    q,
    weights,
    keys,
    table,
    slots,
    lens,
    out,
    q_stride,
    head_stride,
    weight_stride,
    table_stride,
    scale,
    width,
    parts,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    EXACT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Implements `KernelTable.index_logits` with W = `width`; `slots` is its `token_slots`, `out`
    its result. ROW is the elements from one row to the next of `keys`.

    One program per token and part: it computes every `parts`-th block of TOKENS rows. Reads at
    least the first `lens` keys of each token's request once for all heads, and writes `width`
    logits.
    """
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * TOKENS
    slot, count = tl.load(slots + token).to(tl.int64), tl.minimum(tl.load(lens + token), width)
    head = tl.arange(0, QUERIES)
    query = load_heads(q + token * q_stride, head, head_stride, 0, HEADS, DIM, BLOCK_D)
    gain = tl.load(weights + token * weight_stride + head, mask=head < HEADS, other=0.0).to(tl.float32) * scale
    line, turn = out + token * width, parts * TOKENS
    for at in range(first, count, turn):
        place = at + tl.arange(0, TOKENS)
        inside = place < count
        row = paged_rows(table, slot, place, inside, table_stride, PAGE)
        key = load_elements(keys + row * ROW, inside, query.dtype, 0, DIM, BLOCK_D, EXACT, GROUP, BIAS)
        score = tl.maximum(wide_dot(query, tl.trans(key)), 0.0)
        total = tl.sum(score * gain[:, None], axis=0)
        tl.store(line + place, tl.where(inside, total, float("-inf")), mask=place < width)
    seen = tl.cdiv(tl.maximum(count - first, 0), turn)
    for at in range(first + seen * turn, width, turn):
        place = at + tl.arange(0, TOKENS)
        tl.store(line + place, tl.full([TOKENS], float("-inf"), tl.float32), mask=place < width)


@triton.jit
def keys_at(line, at, count, BLOCK: tl.constexpr):
    """Return BLOCK logits from column `at` of the row at `line`: as int32 keys of the same order,
    LOWEST at or past `count`; also their columns, and whether these are below `count`.
    """
    place = at + tl.arange(0, BLOCK)
    inside = place < count
    return tl.where(inside, ordered(tl.load(line + place, mask=inside, other=0.0)), LOWEST), place, inside


@triton.jit
def threshold_of(line, count, wanted, BLOCK: tl.constexpr):
    """Return the largest int32 t such that at least `wanted` of the first `count` keys at `line`
    are >= t.

    Stops early at a smaller t if exactly `wanted` keys are >= t. Each pass over the row determines
    two bits.
    """
    bound, reach, shift = tl.full([], LOWEST, tl.int32), count, 30
    while (shift >= 0) & (reach != wanted):
        step = tl.full([], 1, tl.int32) << shift
        one, two, three = bound + step, bound + step + step, bound + step + step + step
        ones, twos, threes = 0, 0, 0
        for at in range(0, count, BLOCK):
            key, _, _ = keys_at(line, at, count, BLOCK)
            ones += tl.sum((key >= one).to(tl.int32), axis=0)
            twos += tl.sum((key >= two).to(tl.int32), axis=0)
            threes += tl.sum((key >= three).to(tl.int32), axis=0)
        reach = tl.where(
            threes >= wanted, threes, tl.where(twos >= wanted, twos, tl.where(ones >= wanted, ones, reach))
        )
        bound = tl.where(threes >= wanted, three, tl.where(twos >= wanted, two, tl.where(ones >= wanted, one, bound)))
        shift -= 2
    return bound


@triton.jit
def index_top_k_kernel(
    logits,
    lens,
    table,
    slots,
    out,
    stride,
    table_stride,
    width,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Implements `KernelTable.index_top_k` with W = `width`; `slots` is its `token_slots`, `out`
    its result.

    One program per token: it finds the K-th largest key, then stores the rows of larger keys and of
    the first equal ones, in text order. Reads at least the logits once if there are more than K;
    later passes find them in the cache.
    """
    token = tl.program_id(0).to(tl.int64)
    slot, count = tl.load(slots + token).to(tl.int64), tl.minimum(tl.load(lens + token), width)
    line, found = logits + token * stride, out + token * K
    if count <= K:
        for at in range(0, K, BLOCK):
            place = at + tl.arange(0, BLOCK)
            inside = place < count
            row = paged_rows(table, slot, place, inside, table_stride, PAGE).to(tl.int32)
            tl.store(found + place, tl.where(inside, row, -1), mask=place < K)
    else:
        bound = threshold_of(line, count, K, BLOCK)
        above = 0
        for at in range(0, count, BLOCK):
            key, _, _ = keys_at(line, at, count, BLOCK)
            above += tl.sum((key > bound).to(tl.int32), axis=0)
        kept, ties = 0, 0
        for at in range(0, count, BLOCK):
            key, place, inside = keys_at(line, at, count, BLOCK)
            equal = (inside & (key == bound)).to(tl.int32)
            is_kept = (key > bound) | ((equal > 0) & (ties + tl.cumsum(equal, axis=0) <= K - above))
            row = paged_rows(table, slot, place, is_kept, table_stride, PAGE).to(tl.int32)
            rank = kept + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
            tl.store(found + rank, row, mask=is_kept)
            kept += tl.sum(is_kept.to(tl.int32), axis=0)
            ties += tl.sum(equal, axis=0)


def index_logits(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: Tensor,
    token_slots: Tensor,
    lens: Tensor,
    rows_per_page: int,
    scale: float,
    width: int,
    codec: RowCodec | None,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.index_logits`: return float32 [T, width], the indexer's scores of the
    first lens[t] rows of each token's request, -inf after them.
    """
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, width, dtype=torch.float32, device=q.device)
    if not out.numel():
        return out
    form = read_form_of(codec, tuning)
    # Float32 products do not use the matrix unit and need twice the registers.
    step = max(NARROWEST_DOT, tuning.index_tokens // max(1, q.itemsize // 2) ** 2)
    parts = max(1, min(tiles(tuning.programs, tokens), tiles(width, step)))
    index_logits_kernel[(tokens, parts)](
        q,
        weights,
        keys,
        table,
        token_slots,
        lens,
        out,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        table.stride(0),
        scale,
        width,
        parts,
        ROW=keys.stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK_D=max(power_of_two(dim), NARROWEST_DOT, form["GROUP"]),
        QUERIES=max(power_of_two(heads), NARROWEST_DOT),
        TOKENS=step,
        PAGE=rows_per_page,
        **form,
        **tuning.options(tuning.index_logits),
    )
    return out


def index_top_k(
    logits: Tensor,
    lens: Tensor,
    table: Tensor,
    token_slots: Tensor,
    rows_per_page: int,
    k: int,
    tuning: Tuning = Tuning(),
) -> Tensor:
    """Implement `KernelTable.index_top_k`: return the rows of the `k` largest of the first lens[t]
    logits of each token, int32 [T, k], in text order, then -1.
    """
    tokens, width = logits.shape
    out = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    if not tokens:
        return out
    index_top_k_kernel[(tokens,)](
        logits,
        lens,
        table,
        token_slots,
        out,
        logits.stride(0),
        table.stride(0),
        width,
        K=k,
        PAGE=rows_per_page,
        BLOCK=min(tuning.index_scanned, power_of_two(max(width, k))),
        **tuning.options(tuning.index_top_k),
    )
    return out
