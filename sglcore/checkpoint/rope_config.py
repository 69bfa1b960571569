"""Rotary position embedding: the frequencies of a checkpoint's configuration, as host numbers.

The kinds are those of the transformers library. Frequencies never depend on the batch, because keys
in the cache are rotated only once. So `dynamic` is the unscaled embedding with the context limited
to its original length, and `longrope` uses its long factors exactly when the model is opened for
more than its original length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from sglcore.checkpoint.model_config import PROPORTIONAL, ModelConfig, RopeConfig
from sglcore.core.errors import ConfigError

Frequencies: TypeAlias = tuple[np.ndarray, float]
"""float32 [R / 2], the angle per position in radians, and the factor of cosines and sines."""


def rotary_frequencies(config: ModelConfig, max_positions: int) -> Frequencies:
    """Return the frequencies of a model that is opened for `max_positions`, float32 [R / 2] in
    radians per position, and the factor of cosines and sines. R is the size of the rotated part of
    a head. Raises `ConfigError` for an unknown kind, for missing numbers, and for more frequencies
    than a head has."""
    kind = config.rope.kind
    if kind not in KINDS:
        raise ConfigError(f"rope_type {kind!r} is not supported", wanted=f"one of {', '.join(KINDS)}")
    if not 0 <= rotary_dim(config) <= config.head_dim:
        raise ConfigError(
            f"partial_rotary_factor is {config.rope.partial}, {rotary_dim(config)} elements of a head are rotated",
            wanted=f"0 to {config.head_dim}",
        )
    try:
        return KINDS[kind](config, max_positions)
    except KeyError as error:
        raise ConfigError(f"the rope parameters of {kind!r} have no {error.args[0]!r}", wanted="a number") from None


INTERLEAVED = ("Qwen3VL", "Qwen3_5", "Qwen4Exp")
"""Architectures, by the beginning of their names, whose three axes are interleaved by frequency if
the file does not say how they are."""


def mrope_axes(config: ModelConfig) -> np.ndarray | None:
    """Return int32 [R / 2]: the axis (0 time, 1 height, 2 width) of each frequency; None for a
    model with one position per token. The axes are in three sections (Qwen 2-VL, Wang et al. 2024,
    section 2.1), or interleaved as far as the sections reach (Qwen 3-VL). Raises `ConfigError` for
    sections that do not fit."""
    sections = config.rope.scaling.get("mrope_section")
    if sections is None:
        return None
    if not config.rope.scaling.get("mrope_interleaved", config.architecture.startswith(INTERLEAVED)):
        if sum(sections) != rotary_dim(config) // 2:
            raise ConfigError(f"mrope_section is {sections}", wanted=f"a sum of {rotary_dim(config) // 2} frequencies")
        return np.repeat(np.arange(3, dtype=np.int32), sections)
    axes = np.zeros(rotary_dim(config) // 2, np.int32)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rotary_dim(config: ModelConfig) -> int:
    """Return the number of rotated elements of a head: the share `partial` of `head_dim`, or the
    whole head for a proportional embedding, whose remaining frequencies are zero."""
    return config.head_dim if config.rope.kind == PROPORTIONAL else int(config.head_dim * config.rope.partial)


def halves_first(heads: int, size: int, turned: int) -> np.ndarray:
    """Return int64 [heads * size]: an order of the rows of heads that moves rotated pairs apart.
    Entry i is the old index of the new row i.

    The first `turned` rows of each head are pairs of neighbours; in this order the two rows of a
    pair are `turned` / 2 apart.
    """
    head = np.concatenate((np.arange(0, turned, 2), np.arange(1, turned, 2), np.arange(turned, size)))
    return (np.arange(heads)[:, None] * size + head).reshape(-1)


def _exponents(config: ModelConfig) -> np.ndarray:
    size = rotary_dim(config)
    return np.arange(0, size, 2, dtype=np.float32) / np.float32(size)


def _wavelengths(config: ModelConfig) -> np.ndarray:
    """Return float32 [R / 2], the unscaled embedding's positions per radian. Computed by float64
    powers and rounded once: float32 powers are off by a unit in the last place, which shows in the
    angles of long contexts."""
    return (config.rope.theta ** _exponents(config).astype(np.float64)).astype(np.float32)


def _default(config: ModelConfig, max_positions: int) -> Frequencies:
    return np.float32(1.0) / _wavelengths(config), 1.0


def _proportional(config: ModelConfig, max_positions: int) -> Frequencies:
    """Return a whole head's frequencies: the highest `partial` share of them, divided by a factor
    if there is one, then zeros. The factor of cosines and sines is 1."""
    frequencies = _default(config, max_positions)[0]
    frequencies[int(config.rope.partial * config.head_dim // 2) :] = 0
    return frequencies / np.float32(config.rope.scaling.get("factor", 1.0)), 1.0


def _linear(config: ModelConfig, max_positions: int) -> Frequencies:
    return _default(config, max_positions)[0] / np.float32(config.rope.scaling["factor"]), 1.0


def _yarn(config: ModelConfig, max_positions: int) -> Frequencies:
    """Return YaRN's frequencies and its factor of cosines and sines (Peng et al. 2023, sections
    3.2, 3.4): high frequencies stay, low ones are divided by the factor, with a ramp between them.
    """
    rope, size = config.rope, rotary_dim(config)
    factor = rope.scaling.get("factor") or config.max_position_embeddings / rope.original_max

    def turning_at(rotations: float) -> float:
        return size * math.log(rope.original_max / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = turning_at(rope.scaling.get("beta_fast") or 32)
    high = turning_at(rope.scaling.get("beta_slow") or 1)
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    ramp = (np.arange(size // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    kept = np.float32(1.0) - ramp.clip(0, 1)
    wavelengths = _wavelengths(config)
    divided = np.float32(1.0) / (np.float32(factor) * wavelengths)
    frequencies = divided * (np.float32(1.0) - kept) + (np.float32(1.0) / wavelengths) * kept
    return frequencies, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeConfig, factor: float) -> float:
    given = rope.scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = rope.scaling.get("mscale"), rope.scaling.get("mscale_all_dim")
    return scale(weight) / scale(weight_all) if weight and weight_all else scale(1)


def _llama3(config: ModelConfig, max_positions: int) -> Frequencies:
    """Return Llama 3.1's frequencies, with the factor 1 for cosines and sines: long wavelengths are
    stretched by `factor`, short ones stay, with a smooth step between them."""
    rope = config.rope
    factor, low, high = (float(rope.scaling[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = _default(config, max_positions)[0]
    turns = np.float32(2 * math.pi) / frequencies
    smooth = (np.float32(rope.original_max) / turns - np.float32(low)) / np.float32(high - low)
    divided = frequencies / np.float32(factor)
    between = (np.float32(1.0) - smooth) * divided + smooth * frequencies
    is_long, is_short = turns > rope.original_max / low, turns < rope.original_max / high
    return np.where(is_long, divided, np.where(is_short, frequencies, between)), 1.0


def _longrope(config: ModelConfig, max_positions: int) -> Frequencies:
    """Return LongRoPE's frequencies and attention factor (Ding et al. 2024). Each frequency is
    divided by a number of `long_factor` if `max_positions` exceeds the original length, else of
    `short_factor`. Raises `ConfigError` unless there is one for each frequency."""
    rope = config.rope
    name = "long_factor" if max_positions > rope.original_max else "short_factor"
    factors = np.array(rope.scaling[name], dtype=np.float32)
    if len(factors) != rotary_dim(config) // 2:
        raise ConfigError(
            f"{name} has {len(factors)} numbers", wanted=f"{rotary_dim(config) // 2}, one for each frequency"
        )
    frequencies = np.float32(1.0) / (factors * _wavelengths(config))
    given = rope.scaling.get("attention_factor")
    if given is not None:
        return frequencies, float(given)
    factor = rope.scaling.get("factor") or config.max_position_embeddings / rope.original_max
    return frequencies, math.sqrt(1 + math.log(factor) / math.log(rope.original_max)) if factor > 1 else 1.0


KINDS: Mapping[str, Callable[[ModelConfig, int], Frequencies]] = MappingProxyType(
    {
        "default": _default,
        "dynamic": _default,
        "linear": _linear,
        "llama3": _llama3,
        "longrope": _longrope,
        PROPORTIONAL: _proportional,
        "yarn": _yarn,
    }
)
