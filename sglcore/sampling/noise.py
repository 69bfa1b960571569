"""The integers that all samplers share: fixed-point formats, the keyed hash, and two small tables.

Log-probabilities and noise are in units of 2**-16 nat, weights in units of 2**-30. Nothing here
rounds twice or depends on a mathematics library at run time, so equal logits give the same token on
every device.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

FRACTION_BITS = 16
ONE = 1 << FRACTION_BITS
LIMIT = 32 * ONE
"""A gap of 32 nats below the best token. A token at or beyond it is no candidate: noise spans 25.3
nats, so it could never be drawn. The bound makes every later sum fit 32 bits.
"""

MANTISSA_BITS = 8
INTERPOLATION_BITS = 23 - MANTISSA_BITS
GUMBEL_SIZE = 1 << 14
FOLD = 2.0**-32

WEIGHT_BITS = 30
WEIGHT_STEP_BITS = 8
WEIGHT_SIZE = (LIMIT >> WEIGHT_STEP_BITS) + 1
TOP_P_BITS = 24
TOP_P_OFF = (1 << TOP_P_BITS) + 1
SHARE_BITS = 24
COIN_ID = 1 << 22
"""The id of the hash that is a draw's coin; no vocabulary has this id."""
OFF = 2**31 - 1
"""The value of top_k and min_p for a row without that cut-off."""

CONTENDERS = 8
"""Number of leading tokens of a race among which `leaders` divides the probability: the drawn token
is assumed to be one of them.
"""
SPREAD, OWN = 2.0, 0.1
"""A contender g nats after the first is drawn in proportion to exp(-SPREAD * sqrt(g)) times its own
probability to the power of OWN.

Draft and target logits mostly differ little but sometimes much, so the chance falls with g far
slower than an exponential. A token that reached its rank through the noise is accepted less often.
Both constants are fitted to acceptance rates by rank in 64 stories of the embedded model, with both
of its draft heads, greedy and sampled; the stories of benchmarks/draft_trees.py are not among them.
"""

MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B
ID_OFFSET = 0x9E3779B9
POSITION_FACTOR = 0x9E3779B1
SEED_OFFSET = 0x9E3779B97F4A7C15
INDEX_FACTOR = 0xD1342543DE82EF95
MIX64_1 = 0xBF58476D1CE4E5B9
MIX64_2 = 0x94D049BB133111EB

WORD = 0xFFFFFFFF
LONG_WORD = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class NoiseTables:
    """Read-only tables: `gumbel` int32[2, 2**14] and `weight` int32[2, 8193]. Row 0 is the value,
    row 1 the step.

    `gumbel` is indexed by sign, exponent and 8 mantissa bits of the hash as a float, which gives
    both tails the same resolution. `weight` is exp(-gap) at multiples of 2**-8 nat; its row 1 is
    the (positive) drop to the next entry.
    """

    gumbel: np.ndarray
    weight: np.ndarray


@cache
def noise_tables() -> NoiseTables:
    """Return the tables. They are computed on first use (about 10 ms) and immutable afterwards."""
    tables = NoiseTables(_gumbel_table(), _weight_table())
    tables.gumbel.flags.writeable = False
    tables.weight.flags.writeable = False
    return tables


def gumbel_knot(negative: bool, octave: int, step: int) -> float:
    """Return Gumbel noise at u = x / 2**32 (or 1 - x / 2**32 if negative), x = 2**octave * (1 +
    step / 256), in 2**-16 nat.
    """
    x = math.ldexp(1.0 + step / (1 << MANTISSA_BITS), octave - 32)
    return -math.log(-math.log1p(-x) if negative else -math.log(x)) * ONE


def weight_knot(index: int) -> float:
    """Return exp(-index / 2**8 nat) in units of 2**-30."""
    return math.exp(-index / (1 << (FRACTION_BITS - WEIGHT_STEP_BITS))) * (1 << WEIGHT_BITS)


def gumbel_index(negative: bool, octave: int, step: int) -> int:
    """Return the index of a knot: exponent and mantissa bits of the folded float, modulo the
    table's size (see gumbel_race.py).
    """
    exponent = 127 + octave - (32 if negative else 0)
    return ((exponent << MANTISSA_BITS) + step) % GUMBEL_SIZE


def _gumbel_table() -> np.ndarray:
    table = np.zeros((2, GUMBEL_SIZE), np.int32)
    for negative in (False, True):
        for octave in range(31):
            knots = [round(gumbel_knot(negative, octave, step)) for step in range(1 << MANTISSA_BITS)]
            knots.append(round(gumbel_knot(negative, octave + 1, 0)))
            start = gumbel_index(negative, octave, 0)
            table[0, start : start + len(knots) - 1] = knots[:-1]
            table[1, start : start + len(knots) - 1] = np.diff(knots)
        table[0, gumbel_index(negative, 31, 0)] = round(gumbel_knot(negative, 31, 0))
    return table


def _weight_table() -> np.ndarray:
    knots = np.array([round(weight_knot(index)) for index in range(WEIGHT_SIZE + 1)], np.int64)
    return np.stack([knots[:-1], knots[:-1] - knots[1:]]).astype(np.int32)


def mix32(x: int) -> int:
    """Return the 32-bit avalanche hash of an unsigned word (xorshift-multiply, the published
    `lowbias32` constants).
    """
    x ^= x >> 16
    x = x * MIX_1 & WORD
    x ^= x >> 15
    x = x * MIX_2 & WORD
    return x ^ x >> 16


def hashed_ids(count: int) -> np.ndarray:
    """Return int32[count]: the avalanche hash of each vocabulary id, common to all rows."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(ID_OFFSET)
    x ^= x >> np.uint32(16)
    x *= np.uint32(MIX_1)
    x ^= x >> np.uint32(15)
    x *= np.uint32(MIX_2)
    x ^= x >> np.uint32(16)
    return x.view(np.int32)


def seed_words(seeds: np.ndarray, sample_indices: np.ndarray, stream: int = 0) -> np.ndarray:
    """Return key words int32[R, 2] from uint64[R] seeds and sample indices; the device mixes in the
    position.

    `stream` separates independent uses of one seed (0: the target model's draw).
    """
    index = sample_indices.astype(np.uint64) + (np.uint64(stream) << np.uint64(32))
    key = _mix64(seeds.astype(np.uint64) + np.uint64(SEED_OFFSET))
    key = _mix64(key + index * np.uint64(INDEX_FACTOR))
    words = np.stack([key & np.uint64(WORD), key >> np.uint64(32)], axis=1)
    return words.astype(np.uint32).view(np.int32)


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ x >> np.uint64(30)) * np.uint64(MIX64_1)
    x = (x ^ x >> np.uint64(27)) * np.uint64(MIX64_2)
    return x ^ x >> np.uint64(31)


def mix64(x: int) -> int:
    """Return the 64-bit avalanche hash of an unsigned word (the `splitmix64` finaliser)."""
    x = (x ^ x >> 30) * MIX64_1 & LONG_WORD
    x = (x ^ x >> 27) * MIX64_2 & LONG_WORD
    return x ^ x >> 31


def fixed_scale(temperature: float) -> np.float32:
    """Return the multiplier that converts a logit gap to 2**-16 nat at this temperature (> 0)."""
    return np.float32(ONE / temperature)


def fixed_top_p(top_p: float) -> int:
    """Return top_p in units of 2**-24, at least 1; 1.0 gives TOP_P_OFF, which keeps even tokens of
    weight 0.
    """
    return TOP_P_OFF if top_p >= 1.0 else max(1, round(top_p * (1 << TOP_P_BITS)))


def fixed_share(share: float) -> int:
    """Return a number in [0, 1] in units of 2**-24."""
    return round(share * (1 << SHARE_BITS))


def fixed_min_p(min_p: float) -> int:
    """Return the largest gap that min_p keeps, in 2**-16 nat; 0.0 gives OFF."""
    return OFF if min_p <= 0.0 else math.floor(-math.log(min_p) * ONE)
