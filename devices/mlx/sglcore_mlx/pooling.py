"""Pooling: reduces each request's hidden states to one vector, by the core's `Pooling`
(`checkpoint/pooling_config.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import mlx.core as mx

from sglcore.checkpoint.pooling_config import Pooling
from sglcore.step.pooling_rows import pooled_rows
from sglcore.worker.schedule_batch import ScheduleBatch

Rows = Mapping[str, mx.array]
"""The result of `pooled_rows` as arrays."""


def pool(
    pooling: Pooling, classify: Callable[[mx.array], mx.array], hidden: mx.array, batch: ScheduleBatch
) -> mx.array:
    """Pool hidden [T, H] of B sequences to float32 [B, len(modes) * H], or to float32 [B, labels]
    through `classify`, the model's classification head, if `pooling` has labels; then a sigmoid or
    a norm to length 1 as `pooling` says. Lazy."""
    rows = {name: mx.array(values) for name, values in pooled_rows(batch).items()}
    wide = hidden.astype(mx.float32)
    pooled = mx.concatenate([POOLS[mode](wide, rows) for mode in pooling.modes], axis=-1)
    if pooling.labels:
        pooled = classify(pooled.astype(hidden.dtype)).astype(mx.float32)
    if pooling.is_sigmoid:
        pooled = mx.sigmoid(pooled)
    if pooling.is_normalized:
        pooled = pooled / mx.maximum(mx.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
    return pooled


def _sums(hidden: mx.array, rows: Rows) -> mx.array:
    return mx.zeros((rows["first"].size, hidden.shape[1]), mx.float32).at[rows["owners"]].add(hidden)


def _weighted_mean(hidden: mx.array, rows: Rows) -> mx.array:
    lengths = rows["lengths"][:, None].astype(mx.float32)
    return _sums(hidden * rows["weights"][:, None], rows) / (lengths * (lengths + 1) / 2)


def _largest(hidden: mx.array, rows: Rows) -> mx.array:
    found = mx.full((rows["first"].size, hidden.shape[1]), -mx.inf, mx.float32)
    return found.at[rows["owners"]].maximum(hidden)


POOLS: Mapping[str, Callable[[mx.array, Rows], mx.array]] = MappingProxyType(
    {
        "cls": lambda hidden, rows: hidden[rows["first"]],
        "max": _largest,
        "mean": lambda hidden, rows: _sums(hidden, rows) / rows["lengths"][:, None],
        "mean_sqrt_len_tokens": lambda hidden, rows: _sums(hidden, rows) / mx.sqrt(rows["lengths"][:, None]),
        "weightedmean": _weighted_mean,
        "lasttoken": lambda hidden, rows: hidden[rows["last"]],
    }
)
"""A function for each mode: hidden float32 [T, H] to float32 [B, H]."""
