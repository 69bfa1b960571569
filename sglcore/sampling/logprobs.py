"""Log-probabilities of raw logits: of the chosen token, its rank, and the best alternatives. fp32,
bounded memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sglcore.sampling.state import Logprobs

ID_BITS = 22


def logprobs_of(
    logits: Tensor, target_ids: Tensor, top_n: int, block_elements: int = 1 << 21, is_narrow: bool = False
) -> Logprobs[Tensor]:
    """Return the log-probabilities of target_ids int[T] under logits float[T, V], their ranks, and
    the min(top_n, V) best tokens of each row, best first.

    Whole rows of about `block_elements` logits are processed at a time. Working memory is about 20
    bytes per element of a block. Targets outside the vocabulary are clamped to it. `is_narrow`: use
    no 64-bit integers. No host reads; zero rows are allowed.
    """
    count, vocab_size = logits.shape
    top_n = min(top_n, vocab_size)
    result = Logprobs(
        torch.empty(count, dtype=torch.float32, device=logits.device),
        torch.empty(count, dtype=torch.int32, device=logits.device),
        torch.empty(count, top_n, dtype=torch.int32, device=logits.device),
        torch.empty(count, top_n, dtype=torch.float32, device=logits.device),
    )
    step = max(1, block_elements // vocab_size)
    targets = target_ids.to(torch.int32).clamp(0, vocab_size - 1)
    best = _narrow_top_ids if is_narrow else _top_ids
    for start in range(0, count, step):
        rows = slice(start, start + step)
        _fill(result, rows, logits[rows].float(), targets[rows], top_n, best)
    return result


def _fill(
    result: Logprobs[Tensor],
    rows: slice,
    logits: Tensor,
    targets: Tensor,
    top_n: int,
    best: Callable[[Tensor, Tensor, int], Tensor],
) -> None:
    norm = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, targets[:, None])
    result.chosen[rows] = (chosen - norm)[:, 0]
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    ahead = (logits > chosen) | ((logits == chosen) & (ids < targets[:, None]))
    result.ranks[rows] = ahead.sum(-1, dtype=torch.int32) + 1
    if top_n:
        order = best(logits, ids, top_n)
        result.top_ids[rows] = order
        result.top[rows] = logits.gather(1, order) - norm


def _top_ids(logits: Tensor, ids: Tensor, top_n: int) -> Tensor:
    """Return int64[T, N]: the ids (from `ids` int32[V], 0..V-1) of the N largest logits of each
    row, largest first, ties to the lowest id. Value and inverted id form one integer key without
    ties, because topk itself is not stable.
    """
    last = (1 << ID_BITS) - 1
    keys = (_ordered(logits).long() << ID_BITS) | (last - ids)
    return last - (keys.topk(top_n, dim=-1).values & last)


def _narrow_top_ids(logits: Tensor, ids: Tensor, top_n: int) -> Tensor:
    """Return the result of `_top_ids` as int32[T, N], by a stable sort, which is slower."""
    return _ordered(logits).sort(dim=-1, descending=True, stable=True).indices.to(torch.int32)[:, :top_n]


def _ordered(logits: Tensor) -> Tensor:
    """Return int32 values in the order of the float32 values; zeros of both signs are equal."""
    bits = (logits + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
