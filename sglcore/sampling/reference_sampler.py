"""The reference sampler in plain Python integers, slow and obvious: it defines correct results for
every device.

It also has the golden draws: stored inputs with the token that every implementation must draw, for
ports of the race.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglcore.sampling import noise
from sglcore.sampling.noise import LIMIT, WORD, mix32, mix64, noise_tables
from sglcore.sampling.params import SamplingParams

GOLDEN_FILE = Path(__file__).with_name("golden.json")


def row_key(seed: int, sample_index: int, position: int, stream: int = 0) -> tuple[int, int]:
    """Return the two unsigned key words of one draw. The second is odd, because it multiplies.
    `stream` separates independent uses of one seed (0: the target model's draw).
    """
    key = mix64((seed + noise.SEED_OFFSET) & noise.LONG_WORD)
    key = mix64((key + (sample_index + (stream << 32)) * noise.INDEX_FACTOR) & noise.LONG_WORD)
    low, high = key & WORD, key >> 32
    first = mix32((low + position * noise.POSITION_FACTOR) & WORD)
    return first, mix32((high + first) & WORD) | 1


def token_hash(key: tuple[int, int], token: int) -> int:
    """Return the unsigned 32-bit hash of a vocabulary id under a row key."""
    x = mix32((token + noise.ID_OFFSET) & WORD) ^ key[0]
    x ^= x >> 16
    x = x * key[1] & WORD
    x ^= x >> 15
    x = x * noise.MIX_2 & WORD
    return x ^ x >> 16


def gumbel(word: int) -> int:
    """Return Gumbel noise of a hash in 2**-16 nat: u = (word | 1) / 2**32, interpolated between 256
    knots per octave.

    Octaves are counted from the nearer end of (0, 1), so that both tails have the same relative
    resolution.
    """
    word |= 1
    negative = word >> 31 == 1
    magnitude = (1 << 32) - word if negative else word
    octave, mantissa = _float32_parts(magnitude)
    step, fraction = divmod(mantissa, 1 << noise.INTERPOLATION_BITS)
    value, slope = noise_tables().gumbel[:, noise.gumbel_index(negative, octave, step)].tolist()
    return value + (slope * fraction >> noise.INTERPOLATION_BITS)


def weight(gap: int) -> int:
    """Return exp(-gap) in units of 2**-30, for a gap in 2**-16 nat. It never grows with the gap."""
    index, fraction = divmod(gap, 1 << noise.WEIGHT_STEP_BITS)
    value, drop = noise_tables().weight[:, index].tolist()
    return value - (drop * fraction >> noise.WEIGHT_STEP_BITS)


def gaps_below_best(logits: Sequence[float], temperature: float) -> list[int]:
    """Return the distance of each token from the best one after temperature, in 2**-16 nat, at most
    LIMIT (= no candidate).
    """
    scale = noise.fixed_scale(temperature)
    row = np.asarray(logits, np.float32)
    best = row.max()
    gaps = []
    for logit in row:
        scaled = (best - logit) * scale
        gaps.append(int(np.rint(scaled)) if scaled < LIMIT else LIMIT)
    return gaps


def candidates(gaps: Sequence[int], params: SamplingParams) -> list[int]:
    """Return the token ids that remain after top_k, then top_p, then min_p, sorted by (gap, id)."""
    order = sorted((gap, token) for token, gap in enumerate(gaps) if gap < LIMIT)
    if params.top_k > 0:
        order = order[: params.top_k]
    share, total, before, kept = noise.fixed_top_p(params.top_p), sum(weight(gap) for gap, _ in order), 0, []
    for gap, token in order:
        if before << noise.TOP_P_BITS < share * total:
            kept.append((gap, token))
        before += weight(gap)
    return [token for gap, token in kept if gap <= noise.fixed_min_p(params.min_p)]


def without_top(kept: Sequence[int], gaps: Sequence[int], params: SamplingParams) -> list[int]:
    """Return the candidates that XTC keeps when its coin applies it: all but those with at least
    `xtc_threshold` of the weight of `kept`; the last of these is kept. `kept` is sorted by (gap,
    id), and so is the result.
    """
    share, total = noise.fixed_share(params.xtc_threshold), sum(weight(gaps[token]) for token in kept)
    top = [token for token in kept if weight(gaps[token]) << noise.SHARE_BITS >= share * total]
    return [token for token in kept if token not in top[:-1]]


def coin(key: tuple[int, int]) -> int:
    """Return the draw's coin under a row key, 0..2**24-1."""
    return token_hash(key, noise.COIN_ID) >> (32 - noise.SHARE_BITS)


def reference_draw(
    logits: Sequence[float], params: SamplingParams, seed: int, sample_index: int, position: int
) -> tuple[int, bool]:
    """Return (token, is bad) for one row of logits that penalties, bias and masks have already
    changed. Applies temperature, cut-offs and XTC. A row with NaN, +inf or only -inf is bad and
    draws 0.
    """
    best = max((float(logit) for logit in logits), key=lambda x: math.inf if math.isnan(x) else x)
    if not math.isfinite(best):
        return 0, True
    if params.is_greedy:
        return list(logits).index(best), False
    gaps = gaps_below_best(logits, params.temperature)
    key, kept = row_key(seed, sample_index, position), candidates(gaps, params)
    if params.excludes_top:
        if coin(key) < noise.fixed_share(params.xtc_probability):
            kept = without_top(kept, gaps, params)
        gaps = gaps_below_best(
            [logit if token in set(kept) else -math.inf for token, logit in enumerate(logits)], params.temperature
        )
    scores = [(gumbel(token_hash(key, token)) - gaps[token], -token) for token in kept]
    return -max(scores)[1], False


def _float32_parts(magnitude: int) -> tuple[int, int]:
    """Return exponent (without bias) and 23 mantissa bits of a positive integer as a float, rounded
    to nearest, ties to even.
    """
    octave = magnitude.bit_length() - 1
    if octave <= 23:
        return octave, (magnitude << (23 - octave)) - (1 << 23)
    shift = octave - 23
    quotient, rest = magnitude >> shift, magnitude & ((1 << shift) - 1)
    half = 1 << (shift - 1)
    quotient += rest > half or (rest == half and quotient & 1 == 1)
    return (octave + 1, 0) if quotient == 1 << 24 else (octave, quotient - (1 << 23))


@dataclass(frozen=True, slots=True)
class GoldenDraw:
    """One stored draw: its inputs, and the `token` that every implementation must draw. `logits`
    are exact in 16-bit and wider floats.
    """

    name: str
    logits: tuple[float, ...]
    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    token: int


def golden_draws() -> tuple[GoldenDraw, ...]:
    """Return the draws that every device must reproduce, from golden.json."""
    return tuple(
        GoldenDraw(
            case["name"],
            _golden_logits(case["logits"]),
            SamplingParams(**case["params"]),
            case["seed"],
            case["sample_index"],
            case["position"],
            case["token"],
        )
        for case in json.loads(GOLDEN_FILE.read_text())["draws"]
    )


def _golden_logits(source: Any) -> tuple[float, ...]:
    """Return logits from a list of multiples of 1/64 (null = -inf), or from {"scramble": count}:
    multiples of 1/16 in [-8, 8), computed by a formula.
    """
    if isinstance(source, dict):
        return tuple(((v * 2654435761 & WORD) >> 24) / 16 - 8 for v in range(source["scramble"]))
    return tuple(-math.inf if value is None else value / 64 for value in source)
