"""Top-k, top-p and min-p on integer gaps without sorting: a two-level histogram finds the end of
the kept prefix.

Candidates are ordered by (gap, id), both ascending. A token that is dropped gets the gap LIMIT,
which is no candidate. Sums are integers (64-bit for weights where the device has them), so the
order of addition cannot matter. No host reads.
"""

import torch
from torch import Tensor

from sglcore.sampling import narrow_sums
from sglcore.sampling.noise import LIMIT, OFF, TOP_P_BITS, WEIGHT_STEP_BITS

BIN_BITS = 11
BINS = (LIMIT >> BIN_BITS) + 1
STEPS = 1 << BIN_BITS


def token_weights(gaps: Tensor, table: Tensor) -> Tensor:
    """Return exp(-gap) in units of 2**-30, int32; gaps int32 of any shape in 0..LIMIT, table
    int32[2, 8193].
    """
    index = gaps.bitwise_right_shift(WEIGHT_STEP_BITS).view(-1)
    drop = table[1].index_select(0, index).view(gaps.shape)
    drop.mul_(gaps.bitwise_and((1 << WEIGHT_STEP_BITS) - 1)).bitwise_right_shift_(WEIGHT_STEP_BITS)
    return table[0].index_select(0, index).view(gaps.shape).sub_(drop)


def keep_top_k_(gaps: Tensor, top_k: Tensor) -> Tensor:
    """Keep the first top_k int32[B] candidates of each row of gaps int32[B, V], ordered by (gap,
    id). Set the other gaps to LIMIT in place and return `gaps`. A row with fewer candidates, or
    with `noise.OFF`, keeps all.
    """
    ones = torch.ones((), dtype=torch.int32, device=gaps.device).expand(gaps.shape)
    last, before = _prefix_end(gaps, ones, top_k)
    return _drop_after_(gaps, last, top_k - before)


def keep_top_p_(gaps: Tensor, top_p: Tensor, table: Tensor, is_narrow: bool = False) -> Tensor:
    """Keep in each row of gaps int32[B, V] the smallest prefix, ordered by (gap, id), with a weight
    of at least top_p int32[B] / 2**24 of the row's candidates. Set the other gaps to LIMIT in place
    and return `gaps`.

    `table` is `RaceTables.weight`, int32[2, 8193]. `is_narrow`: use no 64-bit integers, which takes
    more operations.
    """
    weights = token_weights(gaps, table)
    if is_narrow:
        last, rest = narrow_sums.prefix_end(gaps, weights, top_p, BIN_BITS, LIMIT)
        each = token_weights(last, table).clamp_(min=1)
        return _drop_after_(gaps, last, narrow_sums.ties(rest, each))
    weights = weights.long()
    wanted = _share(weights.sum(-1), top_p.long())
    last, before = _prefix_end(gaps, weights, wanted)
    each = token_weights(last, table).long().clamp_(min=1)
    ties = torch.div(wanted - before + each - 1, each, rounding_mode="floor")
    return _drop_after_(gaps, last, ties)


def keep_min_p_(gaps: Tensor, min_p: Tensor) -> Tensor:
    """Keep in each row of gaps int32[B, V] the candidates with a gap of at most min_p int32[B]. Set
    the other gaps to LIMIT in place and return `gaps`.
    """
    beyond = (gaps - min_p[:, None]).clamp_(0, 1)
    return _drop_(gaps, beyond)


def weight_of_share(weights: Tensor, share: Tensor, is_narrow: bool = False) -> Tensor:
    """Return int32[B]: share int32[B] / 2**24 of the sum of weights int32[B, V], rounded up, at
    most 2**31 - 1. A token with at least this weight has at least that share.
    """
    if is_narrow:
        return narrow_sums.weight_of_share(weights, share)
    return _share(weights.sum(-1, dtype=torch.int64), share.long()).clamp_(max=OFF).to(torch.int32)


def _share(total: Tensor, top_p: Tensor) -> Tensor:
    """Return ceil(total * top_p / 2**24) for int64[B] each, without the 2**72 product."""
    high, low = total >> TOP_P_BITS, total & ((1 << TOP_P_BITS) - 1)
    return high * top_p + ((low * top_p + (1 << TOP_P_BITS) - 1) >> TOP_P_BITS)


def _prefix_end(gaps: Tensor, weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of gaps int32[B, V] the gap int32[B] at which the running weight reaches
    `wanted` [B] (of the dtype of the weights [B, V]), and the weight of the smaller gaps.

    If it never does, the gap is LIMIT, after every candidate.
    """
    bins = gaps >> BIN_BITS
    reached, before = _first_reaching(_histogram(bins, weights, BINS), wanted)
    # Other bins add zeros, spread over all columns: a single column for them would serialise the
    # additions.
    inside = bins.bitwise_xor_(reached[:, None]).clamp_(max=1).bitwise_xor_(1)
    fine = _histogram(gaps.bitwise_and(STEPS - 1), weights * inside, STEPS)
    step, more = _first_reaching(fine, wanted - before)
    return ((reached << BIN_BITS) + step).clamp_(max=LIMIT), before + more


def _histogram(index: Tensor, weights: Tensor, size: int) -> Tensor:
    sums = torch.zeros(index.shape[0], size, dtype=weights.dtype, device=index.device)
    return sums.scatter_add_(1, index, weights)


def _first_reaching(sums: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first column (int32[B]) at which the running sum reaches `wanted`, or else the
    last one, and the sum before it.
    """
    running = sums.cumsum(-1, dtype=sums.dtype)
    column = (running < wanted[:, None]).sum(-1, dtype=torch.int32).clamp_(max=sums.shape[1] - 1)[:, None]
    before = running.gather(1, column) - sums.gather(1, column)
    return column[:, 0], before[:, 0]


def _drop_after_(gaps: Tensor, last: Tensor, ties: Tensor) -> Tensor:
    """Set to LIMIT, in place, the gaps above `last` and those equal to `last` except the first
    `ties`; `last` and `ties` have one number per row. Returns `gaps`.
    """
    side = (gaps - last[:, None]).clamp_(-1, 1)
    equal = side.abs().bitwise_xor_(1)
    late = equal.cumsum(-1, dtype=torch.int32).sub_(ties[:, None].clamp(max=LIMIT << 1).to(torch.int32)).clamp_(max=1)
    return _drop_(gaps, side.add_(late.mul_(equal)).clamp_(min=0))


def _drop_(gaps: Tensor, dropped: Tensor) -> Tensor:
    """Set gaps to LIMIT, in place, where `dropped` int32 (of their shape, overwritten) is 1, and
    return them. LIMIT is a power of two, so a bitwise or is enough.
    """
    return gaps.bitwise_or_(dropped.mul_(LIMIT)).clamp_(max=LIMIT)
