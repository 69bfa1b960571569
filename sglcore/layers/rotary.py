"""Rotary position embedding: `cos_sin_cache` makes the cosines and sines of every position, once,
when the model is built. Kernels rotate by this table."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.checkpoint.rope_config import mrope_axes, rotary_frequencies


def cos_sin_cache(config: ModelConfig, max_positions: int, device: torch.device) -> Tensor:
    """Return float32 [max_positions, R]: R / 2 cosines, then R / 2 sines, of each position; R is
    the rotated part of a head.

    Raises the errors of `rotary_frequencies`.
    """
    frequencies, factor = rotary_frequencies(config, max_positions)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), torch.from_numpy(frequencies))
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)


def axes_of(config: ModelConfig, device: torch.device) -> Tensor | None:
    """Return the result of `mrope_axes`, int32 [R / 2], on the device; None if the model's rotary
    embedding has one position per token."""
    axes = mrope_axes(config)
    return None if axes is None else torch.from_numpy(axes).to(device)


def turned_by_axes(cos_sin: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """Return a table float32 [T, R] with a row for each token, for rotary embedding with three
    positions (mrope).

    `cos_sin` [max_positions, R] is the table of all positions, `positions` int32 [3, T]; `axes`
    int32 [R / 2] says which position each frequency takes.
    """
    rows = positions.index_select(0, axes).T.long()
    cosines, sines = cos_sin.chunk(2, dim=-1)
    return torch.cat((cosines.gather(0, rows), sines.gather(0, rows)), dim=-1)
