"""What a layer costs here, measured before the first step: products as large as its own, and the sums that end its blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglcore.device.config import EngineConfig
from sglcore.runtime.loaded_model import LoadedModel
from sglcore.runtime.overlap.cost import Affine, LayerCost

if TYPE_CHECKING:
    from sglcore.runtime.parallel.group import Groups

SUMS = 2
"""Collectives of a layer: one ends its attention, one its feed-forward block."""
BURSTS, IN_BURST = 3, 4


def layer_cost(config: EngineConfig, model: LoadedModel, groups: Groups, device: torch.device) -> LayerCost:
    """Of one layer on this rank. Every rank calls this; waits for all. Products of `rows` with a square matrix stand for those of the
    layer, by the number of its elements; attention's own scores are left out, which makes the computing too short, and so the gain."""
    size, many = model.config.hidden_size, max(config.max_batch_tokens, 64)
    few = many // 8
    weight = torch.zeros(size, size, dtype=model.dtype, device=device)
    times = _elements(model) / groups.tp.size / weight.numel()
    scaled = [(rows, times * _seconds(lambda x: x @ weight, rows, weight)) for rows in (few, many)]
    waited = [(rows, SUMS * _seconds(groups.tp.all_reduce, rows, weight, groups)) for rows in (few, many)]
    return LayerCost(Affine.through(scaled[0], scaled[1]), Affine.through(waited[0], waited[1]))


def _elements(model: LoadedModel) -> float:
    """Of the matrices of a layer that a token passes."""
    config = model.config
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    inside = config.intermediate_size
    if config.moe is not None:
        inside = config.moe.intermediate_size * config.moe.experts_per_token
    return config.hidden_size * (heads + 3 * inside)


@torch.inference_mode()
def _seconds(
    run: Callable[[torch.Tensor], torch.Tensor], rows: int, like: torch.Tensor, groups: Groups | None = None
) -> float:
    x, found = like.new_zeros(rows, like.shape[0]), []
    for _ in range(BURSTS + 1):  # the first makes what is made once
        if groups is not None:
            groups.tp.barrier()
        start = time.perf_counter()
        for _ in range(IN_BURST):
            out = run(x)
        out[0, 0].item()
        found.append((time.perf_counter() - start) / IN_BURST)
    return min(found[1:])
