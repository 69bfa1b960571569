"""Rotary position embedding: the cosines and sines of every position, made once when the model is built.

The kinds are those of the transformers library. Frequencies never depend on the batch, because keys in the cache were
rotated once and for all: `dynamic` is therefore the unscaled embedding, with the context limited to the length it was
trained for, and `longrope` uses its long factors exactly when the model is opened for more than its original length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore.checkpoint.config import ModelConfig, RopeConfig
from sglcore.device.errors import ConfigError

Frequencies = tuple[Tensor, float]


def cos_sin_cache(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """float32 [max_positions, R]: R / 2 cosines, then R / 2 sines, of each position; R is the rotated part of a head."""
    kind = config.rope.kind
    if kind not in KINDS:
        raise ConfigError(f"rope_type {kind!r} is not supported", wanted=f"one of {', '.join(KINDS)}")
    try:
        frequencies, factor = KINDS[kind](config, max_positions)
    except KeyError as error:
        raise ConfigError(f"the rope parameters of {kind!r} have no {error.args[0]!r}", wanted="a number") from None
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)


def rotary_dim(config: ModelConfig) -> int:
    """How many elements of a head are rotated."""
    return int(config.head_dim * config.rope.partial)


def _exponents(config: ModelConfig) -> Tensor:
    size = rotary_dim(config)
    return torch.arange(0, size, 2, dtype=torch.float32) / size


def _default(config: ModelConfig, max_positions: int) -> Frequencies:
    return 1.0 / config.rope.theta ** _exponents(config), 1.0


def _linear(config: ModelConfig, max_positions: int) -> Frequencies:
    return _default(config, max_positions)[0] / config.rope.scaling["factor"], 1.0


def _yarn(config: ModelConfig, max_positions: int) -> Frequencies:
    """YaRN (Peng et al. 2023, sections 3.2, 3.4): high frequencies stay, low ones are divided, between them a ramp."""
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
    kept = 1 - ((torch.arange(size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    wavelengths = rope.theta ** _exponents(config)
    frequencies = (1.0 / (factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
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
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones stay, a smooth step between them."""
    rope = config.rope
    factor, low, high = (rope.scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = _default(config, max_positions)[0]
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_max / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    is_long = wavelengths > rope.original_max / low
    is_short = wavelengths < rope.original_max / high
    return torch.where(is_long, frequencies / factor, torch.where(is_short, frequencies, between)), 1.0


def _longrope(config: ModelConfig, max_positions: int) -> Frequencies:
    """LongRoPE (Ding et al. 2024): one factor for each frequency, from one of two lists."""
    rope = config.rope
    name = "long_factor" if max_positions > rope.original_max else "short_factor"
    factors = torch.tensor(rope.scaling[name], dtype=torch.float32)
    frequencies = 1.0 / (factors * rope.theta ** _exponents(config))
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
        "yarn": _yarn,
    }
)
