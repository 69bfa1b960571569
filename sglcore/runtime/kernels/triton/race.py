"""Parts of the integer race that the kernels of a draw share.

Gaps, weights, noise, and keys that order like floats. Computes the same integers as
`sglcore.sampling`; `sampling.py` combines them.
"""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from sglcore.sampling import noise
from sglcore.sampling.gumbel_race import MAX_VOCAB

LIMIT = tl.constexpr(noise.LIMIT)
IDS = tl.constexpr(MAX_VOCAB)
LAST_ID = tl.constexpr(MAX_VOCAB - 1)
GUMBEL_SIZE = tl.constexpr(noise.GUMBEL_SIZE)
INTERPOLATION_BITS = tl.constexpr(noise.INTERPOLATION_BITS)
WEIGHT_SIZE = tl.constexpr(noise.WEIGHT_SIZE)
WEIGHT_STEP_BITS = tl.constexpr(noise.WEIGHT_STEP_BITS)
WEIGHT_STEP_MASK = tl.constexpr((1 << noise.WEIGHT_STEP_BITS) - 1)
INTERPOLATION_MASK = tl.constexpr((1 << noise.INTERPOLATION_BITS) - 1)
FOLD = tl.constexpr(noise.FOLD)
MIX_1 = tl.constexpr(noise.MIX_1)
MIX_2 = tl.constexpr(noise.MIX_2)
POSITION_FACTOR = tl.constexpr(noise.POSITION_FACTOR)
TO_INTEGER = tl.constexpr(2.0**23)
"""Added to a smaller non-negative float, leaves the nearest integer in the low 23 bits."""
NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)
"""Orders above every number."""


@triton.jit
def ordered(x):
    """Return int32 keys that compare like float32 x: both zeros are equal, and NaN is above all."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, NOT_A_NUMBER, bits)


@triton.jit
def number_of(order):
    """Return the float32 of an int32 key from `ordered`; a key of NaN gives NaN."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def keyed(value, ids):
    """Return int64 keys of int32 values and ids: the largest key is that of the largest value, and
    of equal values that of the lowest id.
    """
    return value.to(tl.int64) * IDS + (ids ^ LAST_ID)


@triton.jit
def best_of(partial, row, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return (value int32, id int32) of the largest of a row's COUNT keys; `partial` is int64
    [rows, COUNT], and BLOCK >= COUNT.
    """
    part = tl.arange(0, BLOCK)
    key = tl.max(tl.load(partial + row * COUNT + part, mask=part < COUNT, other=-(1 << 62)), axis=0)
    return (key >> 22).to(tl.int32), ((key & LAST_ID) ^ LAST_ID).to(tl.int32)


@triton.jit
def gaps_below(logits, best, scale):
    """Return int32 gaps of float32 logits below the row's `best`, in 2**-16 nat after division by
    the temperature (`SamplingState.scale`); LIMIT where a token is no candidate. As
    `sglcore.sampling.gumbel_race.gaps_below_best`.

    The minimum is taken between product and sum, so that a compiler cannot fuse them into one
    operation with one rounding.
    """
    gap = (best - logits) * scale
    gap = tl.where(gap < LIMIT, gap, LIMIT * 1.0)
    return (gap + TO_INTEGER).to(tl.int32, bitcast=True) & 0x7FFFFF


@triton.jit
def weight_of(gap, table):
    """Return exp(-gap) in 2**-30, int32, as `sglcore.sampling.cutoffs.token_weights`; `table` is
    `RaceTables.weight`.
    """
    index = gap >> WEIGHT_STEP_BITS
    drop = tl.load(table + WEIGHT_SIZE + index) * (gap & WEIGHT_STEP_MASK)
    return tl.load(table + index) - (drop >> WEIGHT_STEP_BITS)


@triton.jit
def mix32(words):
    """Return uint32 words with their bits mixed (avalanche), as `sglcore.sampling.noise.mix32`."""
    words = (words ^ (words >> 16)) * tl.full([], MIX_1, tl.uint32)
    words = (words ^ (words >> 15)) * tl.full([], MIX_2, tl.uint32)
    return words ^ (words >> 16)


@triton.jit
def row_key(seed_words, positions, row):
    """Return the two key words uint32 of a row, as `sglcore.sampling.gumbel_race.row_keys`;
    `seed_words` and `positions` are those of `SamplingState`.
    """
    position = tl.load(positions + row).to(tl.uint32, bitcast=True)
    first = tl.load(seed_words + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(seed_words + 2 * row + 1).to(tl.uint32, bitcast=True)
    first = mix32(position * tl.full([], POSITION_FACTOR, tl.uint32) + first)
    return first, mix32(second + first) | 1


@triton.jit
def noise_of(hashed, first, second, table):
    """Return Gumbel noise int32 in 2**-16 nat for ids int32 hashed by `noise.hashed_ids`, as
    `sglcore.sampling.gumbel_race.gumbel_noise`.

    `first` and `second` are the words of `row_key`, `table` is `RaceTables.gumbel`.
    """
    words = hashed.to(tl.uint32, bitcast=True) ^ first
    words = (words ^ (words >> 16)) * second
    words = (words ^ (words >> 15)) * tl.full([], MIX_2, tl.uint32)
    words = (words ^ (words >> 16)) | 1
    ends = words.to(tl.int32, bitcast=True).to(tl.float32)
    bits = tl.where(ends < 0, ends * -FOLD, ends).to(tl.int32, bitcast=True)
    index = (bits >> INTERPOLATION_BITS) & (GUMBEL_SIZE - 1)
    step = tl.load(table + GUMBEL_SIZE + index) * (bits & INTERPOLATION_MASK)
    return tl.load(table + index) + (step >> INTERPOLATION_BITS)
