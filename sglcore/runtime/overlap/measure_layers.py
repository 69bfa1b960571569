"""Measures the cost of a layer before the first step: products of its size, and its collectives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.runtime.loaded_model import LoadedModel
from sglcore.runtime.overlap.micro_batch_cost import Affine, LayerCost

if TYPE_CHECKING:
    from sglcore.runtime.parallel.rank_groups import Groups

BURSTS, IN_BURST = 3, 4


def layer_cost(config: EngineConfig, model: LoadedModel, groups: Groups, device: torch.device) -> LayerCost:
    """Return the cost of one layer on this rank. Every rank calls this; waits for all.

    Products with a square matrix of the hidden size, at two numbers of rows, are measured and
    scaled by the layer's number of matrix elements. Attention scores are left out, which
    underestimates compute time, and so the gain.
    """
    size, many = model.config.hidden_size, max(config.max_batch_tokens, 64)
    few = many // 8
    weight = torch.zeros(size, size, dtype=model.dtype, device=device)
    attention, feed_forward = _elements(model)
    times = (attention + feed_forward) / groups.tp.size / weight.numel()
    scaled = [(rows, times * _seconds(lambda x: x @ weight, rows, weight)) for rows in (few, many)]
    waited = [(rows, _waits(rows, weight, model, groups)) for rows in (few, many)]
    totals = [(rows, sum(waits)) for rows, waits in waited]
    part, (_, waits), (_, total) = attention / (attention + feed_forward), waited[1], totals[1]
    computed = (part, 1 - part) if len(waits) == 2 else (part, 0.0, 1 - part)  # experts first wait for their rows
    parts = tuple((each, wait / total) for each, wait in zip(computed, waits, strict=True))
    return LayerCost(Affine.through(*scaled), Affine.through(*totals), parts)


def _waits(rows: int, like: torch.Tensor, model: LoadedModel, groups: Groups) -> list[float]:
    """Return the seconds of each collective of a layer for `rows` rows.

    An all-reduce after attention, and one after the feed-forward block; with whole experts,
    dispatch and combine instead of the second.
    """
    behind = _seconds(groups.tp.all_reduce, rows, like, groups)
    moe = model.config.moe
    if moe is None or not groups.has_experts_whole:
        return [behind, behind]
    size = groups.ep.size
    sent = max(1, rows * min(moe.experts_per_token, size) // size**2) * size
    exchange = _seconds(groups.ep.all_to_all, sent, like, groups)
    return [behind, exchange, exchange]


def _elements(model: LoadedModel) -> tuple[float, float]:
    """Return the matrix elements per token of a layer's attention and feed-forward block."""
    config = model.config
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    inside = config.intermediate_size
    if config.moe is not None:
        inside = config.moe.intermediate_size * config.moe.experts_per_token
    return config.hidden_size * heads, config.hidden_size * 3.0 * inside


@torch.inference_mode()
def _seconds(
    run: Callable[[torch.Tensor], torch.Tensor], rows: int, like: torch.Tensor, groups: Groups | None = None
) -> float:
    x, found = like.new_zeros(rows, like.shape[0]), []
    for _ in range(BURSTS + 1):  # the first run includes one-time set-up
        if groups is not None:
            groups.tp.barrier()
        start = time.perf_counter()
        for _ in range(IN_BURST):
            out = run(x)
        out[0, 0].item()
        found.append((time.perf_counter() - start) / IN_BURST)
    return min(found[1:])
