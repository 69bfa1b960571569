"""Rotary position embedding: the cosines and sines of every position, made once when the model is built."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.checkpoint.config import ModelConfig
from sglcore.checkpoint.rotary import rotary_frequencies


def cos_sin_cache(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """float32 [max_positions, R]: R / 2 cosines, then R / 2 sines, of each position; R is the rotated part of a head.

    Raises what `rotary_frequencies` raises.
    """
    frequencies, factor = rotary_frequencies(config, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), torch.from_numpy(frequencies))
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)
