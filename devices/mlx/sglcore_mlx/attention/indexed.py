"""Attention to the tokens that an indexer selects (DeepSeek-V3.2, section 2.1)."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import mlx.core as mx

from sglcore_mlx.attention.contract import AttentionPlan
from sglcore_mlx.forward_batch import IndexQueries
from sglcore_mlx.models.contract import LayerShape

SCORES = 1 << 26
"""The most scores of heads that exist at a time in a prompt."""


@runtime_checkable
class ChoosingPlan(AttentionPlan, Protocol):
    """An `AttentionPlan` that can attend to selected tokens."""

    def choose(self, index: IndexQueries, kv: mx.array, layer: LayerShape) -> mx.array | None:
        """Select tokens for each query; None: all are seen. Queues only."""
        ...

    def forward_chosen(self, q: mx.array, kv: mx.array, layer: LayerShape, chosen: mx.array) -> mx.array:
        """Like `forward`, over the tokens that `choose` selected."""
        ...


def index_scores(index: IndexQueries, keys: mx.array) -> mx.array:
    """Return float32 [B, N, S]: the weighted sum of the heads' positive scores. `index`: of N
    queries for each of B requests; keys [B, S, D]."""
    requests, _, size = keys.shape
    heads = index.weights.shape[1]
    queries = index.queries.astype(mx.float32).reshape(requests, -1, size)
    scores = mx.maximum(queries @ keys.astype(mx.float32).swapaxes(1, 2), 0)
    scores = scores.reshape(requests, -1, heads, scores.shape[-1])
    return (index.weights.reshape(requests, -1, 1, heads) @ scores)[:, :, 0]


def highest(scores: mx.array, count: int) -> mx.array:
    """Return the places [..., count] of the highest scores [..., S], in any order; S is at least
    `count`."""
    return mx.argpartition(-scores, kth=count - 1, axis=-1)[..., :count]


def chosen_mask(index: IndexQueries, keys: mx.array, seen: mx.array, count: int) -> mx.array:
    """Return bool [L, S]: the tokens that each query of a prompt attends to, of those in `seen`
    bool [L, S]. keys [S, D]."""
    rows = max(1, SCORES // (keys.shape[0] * index.weights.shape[1]))
    parts: list[mx.array] = []
    for first in range(0, seen.shape[0], rows):
        own = slice(first, first + rows)
        scores = mx.where(seen[own], index_scores(index.of(own), keys[None])[0], -mx.inf)
        places = highest(scores, count)
        none = mx.zeros(scores.shape, mx.bool_)
        parts.append(mx.put_along_axis(none, places, mx.ones(places.shape, mx.bool_), axis=-1) & seen[own])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)
