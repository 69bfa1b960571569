"""The integer Gumbel race on MLX: fixed-point gaps, keyed noise, and the draw. Pure functions of
arrays; all queue only.

Gives the same integers as `sglcore/sampling/gumbel_race.py`;
`sglcore/sampling/reference_sampler.py` defines them. Hashing uses uint32, with wrapping products
and logical shifts.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from sglcore.core.errors import ConfigError
from sglcore.sampling import noise
from sglcore.sampling.noise import FOLD, GUMBEL_SIZE, INTERPOLATION_BITS, LIMIT

ID_BITS = 22
MAX_VOCAB = (1 << ID_BITS) - 1


@dataclass(frozen=True, slots=True)
class RaceTables:
    """Constants of one vocabulary. Entries of `gumbel` and `weight` hold the value in the upper and
    the step in the lower 32 bits, so that one gather fetches both: gathers dominate the cost of a
    draw."""

    gumbel: mx.array
    """int64[16384]"""
    weight: mx.array
    """int64[8193]"""
    ids: mx.array
    """int32[V]"""
    hashed_ids: mx.array
    """uint32[V]"""


def make_race_tables(vocab_size: int) -> RaceTables:
    """Make the tables of a vocabulary from host arrays, so that any thread can use them. Raises
    ConfigError for other sizes than 1 to 2**22 - 1 tokens."""
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens", wanted=f"1..{MAX_VOCAB}", remedy="check vocab_size")
    tables = noise.noise_tables()
    return RaceTables(
        _packed(tables.gumbel),
        _packed(tables.weight),
        mx.array(np.arange(vocab_size, dtype=np.int32)),
        mx.array(noise.hashed_ids(vocab_size).view(np.uint32)),
    )


def row_keys(seed_words: mx.array, positions: mx.array) -> mx.array:
    """Return the key words uint32 [B, 2] of each row's draw, from the request's seed words int32
    [B, 2] and positions int32 [B]. Equal arguments give equal keys on every device."""
    words = seed_words.view(mx.uint32)
    first = _mix32(positions.astype(mx.uint32) * noise.POSITION_FACTOR + words[:, 0])
    second = _mix32(words[:, 1] + first) | 1
    return mx.stack([first, second], axis=1)


def gaps_below_best(logits: mx.array, best: mx.array, scale: mx.array) -> mx.array:
    """Return gaps int32 [B, V]: how far each token is below the best one after temperature, in
    2**-16 nat, LIMIT where a token is no candidate; logits float32 [B, V], best (their maximum) and
    scale (2**16 / temperature) float32 [B].

    A subtraction, a multiplication, and rounding to even: each rounds separately, and a product of
    a difference can not become a fused multiply-add, so a compiler can fuse the loop without
    changing results. If `best` is not finite, the row's gaps are arbitrary integers in 0..LIMIT:
    the conversion of NaN to an integer depends on the device.
    """
    gaps = mx.round((best[:, None] - logits) * scale[:, None])
    return mx.maximum(mx.minimum(gaps, float(LIMIT)).astype(mx.int32), 0)


def gumbel_noise(keys: mx.array, hashed_ids: mx.array, table: mx.array) -> mx.array:
    """Return keyed Gumbel noise int32 [B, V] in 2**-16 nat; keys uint32 [B, 2], hashed_ids uint32
    [V] or uint32 [B, V], table int64 [16384] (`RaceTables.gumbel`)."""
    words = _hash(hashed_ids ^ keys[:, :1], keys) | 1
    # As a signed number the word is the distance from the nearer end of (0, 1); its float exponent
    # is the octave of the tail. Negative words are moved 32 octaves down, so that exponent and
    # mantissa form the index.
    numbers = words.view(mx.int32).astype(mx.float32)
    bits = mx.maximum(numbers, numbers * -FOLD).view(mx.uint32)
    index = (bits >> INTERPOLATION_BITS) & (GUMBEL_SIZE - 1)
    fraction = (bits & ((1 << INTERPOLATION_BITS) - 1)).astype(mx.int32)
    value, step = table_entries(table, index)
    return value + ((step * fraction) >> INTERPOLATION_BITS)


def coins(keys: mx.array) -> mx.array:
    """Return int32[B] in 0..2**24-1: a random number for each draw with keys uint32[B, 2] (XTC)."""
    words = keys[:, :1] ^ noise.mix32((noise.COIN_ID + noise.ID_OFFSET) & noise.WORD)
    return (_hash(words, keys)[:, 0] >> (32 - noise.SHARE_BITS)).astype(mx.int32)


def table_entries(table: mx.array, index: mx.array) -> tuple[mx.array, mx.array]:
    """Return value and step, int32 each in the shape of `index`, of a packed table's entries at
    `index`, uint32 of any shape, which must be within the table (not checked).

    Uses a gather along an axis, which is six times as fast as `take` on the CPU.
    """
    entries = mx.take_along_axis(table, index.reshape(-1), axis=0).reshape(index.shape)
    return (entries >> 32).astype(mx.int32), entries.astype(mx.int32)


def race_scores(gaps: mx.array, keys: mx.array, hashed_ids: mx.array, table: mx.array) -> mx.array:
    """Return the scores of a draw, `gumbel_noise` minus gaps: int32 [B, V] in 2**-16 nat; the token
    with the largest score is drawn."""
    return gumbel_noise(keys, hashed_ids, table) - gaps


def first_argmax(scores: mx.array) -> mx.array:
    """Return int32 [B]: the index of the first maximum of each row of scores [B, V], integers or
    floats. MLX's argmax resolves ties to the lowest index on the CPU and on Metal: its reduction
    compares indices of equal values."""
    return mx.argmax(scores, axis=-1).astype(mx.int32)


def draw_race(gaps: mx.array, keys: mx.array, tables: RaceTables) -> mx.array:
    """Return the token int32 [B] drawn from each row of gaps int32 [B, V] with keys uint32 [B,
    2]."""
    return first_argmax(race_scores(gaps, keys, tables.hashed_ids, tables.gumbel))


def _packed(table: np.ndarray) -> mx.array:
    """Pack int32[2, N] (value, step) to int64[N]."""
    value, step = table.astype(np.int64)
    return mx.array((value << 32) | (step & noise.WORD))


def _hash(words: mx.array, keys: mx.array) -> mx.array:
    """Return the words uint32, hashed with keys uint32 [B, 2]; the words must already include the
    first key word."""
    return _fold(_fold(_fold(words, 16) * keys[:, 1:], 15) * noise.MIX_2, 16)


def _fold(words: mx.array, shift: int) -> mx.array:
    return words ^ (words >> shift)


def _mix32(words: mx.array) -> mx.array:
    """Return `noise.mix32` (an avalanche) of uint32 words."""
    return _fold(_fold(_fold(words, 16) * noise.MIX_1, 15) * noise.MIX_2, 16)
