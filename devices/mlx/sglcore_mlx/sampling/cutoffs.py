"""Top-k, top-p and min-p on integer gaps: one sort of 64-bit keys (gap, id) finds the end of the
kept prefix.

The keys are unique, so ties need no special case. Scatters and running sums are 32 bits wide,
because Metal has no 64-bit scatters and not every build of MLX has 64-bit running sums.
"""

import mlx.core as mx

from sglcore.sampling.noise import LIMIT, TOP_P_BITS, WEIGHT_STEP_BITS
from sglcore_mlx.sampling.race import ID_BITS, RaceTables, table_entries

DIGIT_BITS = 10


def token_weights(gaps: mx.array, table: mx.array) -> mx.array:
    """Return exp(-gap) in units of 2**-30, int32 in the shape of gaps: int32 of any shape in
    0..LIMIT, in 2**-16 nat below the best token. table int64 [8193] is `RaceTables.weight`."""
    value, drop = table_entries(table, (gaps >> WEIGHT_STEP_BITS).astype(mx.uint32))
    return value - ((drop * (gaps & ((1 << WEIGHT_STEP_BITS) - 1))) >> WEIGHT_STEP_BITS)


def keep_prefix(gaps: mx.array, top_k: mx.array | None, top_p: mx.array | None, tables: RaceTables) -> mx.array:
    """Return gaps int32 [B, V] with LIMIT (no candidate) for all but the kept ones: of the tokens
    in order of gap, then id, the first top_k int32 [B], and of these the shortest prefix with at
    least top_p int32 [B] / 2**24 of their weight, at least one. None: no such cut-off."""
    keys = (gaps.astype(mx.int64) << ID_BITS) | tables.ids
    ordered = mx.sort(keys, axis=-1)
    kept = mx.full(gaps.shape[:1], gaps.shape[1], mx.int32) if top_k is None else mx.minimum(top_k, gaps.shape[1])
    if top_p is not None:
        kept = mx.minimum(kept, _reaching(ordered, kept, top_p, tables))
    last = mx.take_along_axis(ordered, kept[:, None] - 1, axis=-1)
    return _drop(gaps, keys > last)


def keep_min_p(gaps: mx.array, min_p: mx.array) -> mx.array:
    """Return gaps int32 [B, V] with LIMIT (no candidate) for those above min_p int32 [B], which is
    given as a gap too."""
    return _drop(gaps, gaps > min_p[:, None])


def running_sums(weights: mx.array) -> mx.array:
    """Return int64[B, V]: inclusive running sums of weights int32[B, V] in 0..2**30. Weights are
    split into three digits of 10 bits; uint32 holds the sum of 2**22 - 1 of them."""
    total = mx.zeros(weights.shape, mx.int64)
    for shift in (2 * DIGIT_BITS, DIGIT_BITS, 0):
        digits = weights >> shift
        if shift < 2 * DIGIT_BITS:
            digits = digits & ((1 << DIGIT_BITS) - 1)
        total = (total << DIGIT_BITS) + mx.cumsum(digits.astype(mx.uint32), axis=-1).astype(mx.int64)
    return total


def _reaching(ordered: mx.array, kept: mx.array, top_p: mx.array, tables: RaceTables) -> mx.array:
    """Return int32 [B]: how many of the first `kept` int32 [B] keys of ordered int64 [B, V] are
    needed to reach the share top_p int32 [B] / 2**24 of their weight; at least 1."""
    weights = token_weights((ordered >> ID_BITS).astype(mx.int32), tables.weight)
    weights = weights * (tables.ids < kept[:, None])
    running = running_sums(weights)
    wanted = _share(running[:, -1], top_p.astype(mx.int64))
    return mx.maximum(mx.sum((running - weights) < wanted[:, None], axis=-1).astype(mx.int32), 1)


def weight_of_share(weights: mx.array, share: mx.array) -> mx.array:
    """Return int64 [B]: the smallest integer weight that is at least share int32 [B] / 2**24 of the
    row's sum of weights int32 [B, V]."""
    return _share(running_sums(weights)[:, -1], share.astype(mx.int64))


def _share(total: mx.array, top_p: mx.array) -> mx.array:
    """Return ceil(total * top_p / 2**24), int64 [B], for int64 [B] each, without a product of up to
    2**76."""
    high, low = total >> TOP_P_BITS, total & ((1 << TOP_P_BITS) - 1)
    return high * top_p + ((low * top_p + ((1 << TOP_P_BITS) - 1)) >> TOP_P_BITS)


def _drop(gaps: mx.array, dropped: mx.array) -> mx.array:
    """Return gaps with LIMIT where `dropped` bool is True. No gap is above LIMIT, so a maximum does
    it."""
    return mx.maximum(gaps, dropped.astype(mx.int32) * LIMIT)
