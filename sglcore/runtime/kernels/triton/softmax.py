"""Softmax over blocks of keys in one pass, and the merge of the results for several parts of the
keys.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.triton.products import wide_dot
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two

LOG2_E = tl.constexpr(1.4426950408889634)
"""Scores are kept in base 2: its exponential is one instruction."""


@triton.jit
def begin(sinks, head, counted, QUERIES: tl.constexpr):
    """Return the running maximum, in base 2, and the running sum of each query row [QUERIES] before
    the first block: -inf and 0, or, where `counted`, the sink of the row's `head` and 1.

    `sinks` is a float tensor [heads], or None.
    """
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    if sinks is not None:
        best = tl.load(sinks + head, mask=counted, other=float("-inf")).to(tl.float32) * LOG2_E
    return best, tl.where(best > float("-inf"), 1.0, 0.0)


@triton.jit
def take_scores(score, values, best, total, mean):
    """Update running maximum, sum and weighted sum of query rows [QUERIES] with one more block, and
    return all three.

    `score` [QUERIES, TOKENS] is in base 2, -inf where a row does not see a token; `values` is
    [TOKENS, DIM], `mean` float32 [QUERIES, DIM] (Milakov and Gimelshein 2018).
    """
    higher = tl.maximum(best, tl.max(score, axis=1))
    # A row that has seen nothing yet has -inf here, which cannot be subtracted.
    level = tl.where(higher > float("-inf"), higher, 0.0)
    weight = tl.exp2(score - level[:, None])
    fade = tl.exp2(best - level)
    total = total * fade + tl.sum(weight, axis=1)
    mean = mean * fade[:, None] + wide_dot(narrow(weight, values.dtype), values)
    return higher, total, mean


@triton.jit
def take_in(query, keys, values, seen, scale, best, total, mean, SOFTCAP: tl.constexpr):
    """As `take_scores`, with the scores of `query` and `keys`; `scale` includes log2(e). SOFTCAP: a
    cap as in `KernelTable.softcap`, or None.

    `seen` [QUERIES, TOKENS], or broadcastable to it, says which tokens a row sees.
    """
    score = wide_dot(query, tl.trans(keys)) * scale
    if SOFTCAP is not None:
        # tanh x = 1 - 2 / (e^2x + 1), and the score is in base 2.
        score = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (tl.exp2(score * (2.0 / SOFTCAP)) + 1.0))
    return take_scores(tl.where(seen, score, float("-inf")), values, best, total, mean)


@triton.jit
def merge_parts(parts, weights, out, row, most, count, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr):
    """Merge a row's `count` partial results by their log2 weights, and store the mean in out [rows,
    DIM].

    parts is float32 [rows, most, DIM], weights float32 [rows, most]; results with the weight -inf
    are not read. Zeros if all have it.
    """
    split, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    weight = tl.load(weights + row * most + split, mask=split < count, other=float("-inf"))
    level = tl.max(weight, axis=0)
    share = tl.exp2(weight - tl.where(level > float("-inf"), level, 0.0))
    has = (weight > float("-inf"))[:, None] & (column < DIM)[None, :]
    part = tl.load(parts + (row * most + split)[:, None] * DIM + column[None, :], mask=has, other=0.0)
    total = tl.sum(share, axis=0)
    mean = tl.sum(part * share[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + column, narrow(mean, out.dtype.element_ty), mask=column < DIM)


@triton.jit
def merge_kernel(
    parts, weights, out, DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Merge the SPLITS partial results of each row: parts float32 [rows, SPLITS, DIM] and their
    log2 weights float32 [rows, SPLITS] to out [rows, DIM].

    One program per row, which is one head of one query. Reads at least SPLITS * DIM float32 for
    each; splits without tokens are not read.
    """
    row = tl.program_id(0).to(tl.int64)
    merge_parts(parts, weights, out, row, SPLITS, SPLITS, DIM, BLOCK_D, BLOCK_S)


def parts_of(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Return buffers for the partial results of `out` [rows, heads, dim]: float32 [rows, heads,
    splits, dim], and float32 [rows, heads, splits] for their log2 weights.

    With one split both are `out`; the weights are then not used.
    """
    if splits == 1:
        return out, out
    parts = out.new_empty((*out.shape[:2], splits, out.shape[2]), dtype=torch.float32)
    return parts, parts.new_empty(parts.shape[:3])


def merged(parts: Tensor, weights: Tensor, out: Tensor, tuning: Tuning) -> Tensor:
    """Merge the filled buffers of `parts_of` into `out` [rows, heads, dim], and return `out`. Does
    nothing if `parts` is `out`.
    """
    if parts is not out:
        rows, heads, splits, dim = parts.shape
        merge_kernel[(rows * heads,)](
            parts,
            weights,
            out,
            DIM=dim,
            BLOCK_D=power_of_two(dim),
            SPLITS=splits,
            BLOCK_S=power_of_two(splits),
            **tuning.options(tuning.merge),
        )
    return out
