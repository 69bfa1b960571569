"""Attention over gathered keys and values for MLX on the CPU: query heads of one KV head are one
matrix product, and each stream computes a share of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from sglcore_mlx.attention.contract import AttentionFacts
from sglcore_mlx.attention.dense import attend
from sglcore_mlx.attention.gathered import GatheredAttention, GatheredPlan
from sglcore_mlx.forward_batch import ForwardBatch, IndexQueries
from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class ProcessorPlan:
    """The plan of `ProcessorAttention`: that of `GatheredAttention`, and the streams that share the
    work."""

    gathered: GatheredPlan
    streams: tuple[mx.Stream, ...]

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """Implements `AttentionPlan.forward`: each stream attends for a share of the requests."""
        rows, count = self.gathered.cells.shape[0], len(self.streams)
        queries = q.reshape(rows, -1, *q.shape[1:])
        mixed = self._shared(queries, kv, layer, rows, count)
        return mixed.reshape(*q.shape[:2], mixed.shape[-1])

    def choose(self, index: IndexQueries, kv: mx.array, layer: LayerShape) -> mx.array | None:
        """Implements `ChoosingPlan.choose`."""
        return self.gathered.choose(index, kv, layer)

    def forward_chosen(self, q: mx.array, kv: mx.array, layer: LayerShape, chosen: mx.array) -> mx.array:
        """Implements `ChoosingPlan.forward_chosen`."""
        return self.gathered.forward_chosen(q, kv, layer, chosen)

    def _shared(self, q: mx.array, kv: mx.array, layer: LayerShape, rows: int, count: int) -> mx.array:
        """Return [B, N, heads, D] from queries [B, N, heads, D]; each of the `count` streams
        computes a share of the `rows` (B) requests. With fewer requests than streams, the default
        stream computes all."""
        if not count or rows < count:
            return self._attend(q, kv, layer, slice(0, rows))
        mixed: list[mx.array] = []
        for number, stream in enumerate(self.streams):
            share = slice(number * rows // count, (number + 1) * rows // count)
            with mx.stream(stream):
                mixed.append(self._attend(q[share], kv, layer, share))
        return mx.concatenate(mixed)

    def _attend(self, q: mx.array, kv: mx.array, layer: LayerShape, rows: slice) -> mx.array:
        """Return [b, N, heads, value D]: attention of the queries q [b, N, heads, D] of the
        requests `rows`; the softmax is in float32."""
        keys, values = layer.parts(kv[self.gathered.cells[rows]])
        mask = self.gathered.masks[layer.sliding_window][rows]
        count, width, heads, size = q.shape
        if layer.softcap is not None or layer.sinks is not None:
            given = q.swapaxes(1, 2), keys.swapaxes(1, 2), values.swapaxes(1, 2)
            return attend(*given, mask, layer).swapaxes(1, 2)
        kinds, each = layer.num_kv_heads, heads // layer.num_kv_heads
        shared = q.reshape(count, width, kinds, each, size).swapaxes(1, 2).reshape(count, kinds, width * each, size)
        scores = (shared * layer.scale) @ keys.transpose(0, 2, 3, 1)
        seen = mask if width == 1 else mx.repeat(mask, each, axis=2)
        weights = mx.softmax(mx.where(seen, scores.astype(mx.float32), -mx.inf), axis=-1).astype(q.dtype)
        mixed = (weights @ values.swapaxes(1, 2)).reshape(count, kinds, width, each, values.shape[-1])
        return mixed.swapaxes(1, 2).reshape(count, width, heads, values.shape[-1])


class ProcessorAttention:
    """Attention for the CPU, where `mx.fast` attention is not one kernel but composed of
    operations: this backend needs fewer operations. `GatheredAttention` is its reference."""

    facts: ClassVar[AttentionFacts] = AttentionFacts(compute=("cpu",))

    def __init__(self, layers: Sequence[LayerShape], page_size: int, streams: tuple[mx.Stream, ...] = ()) -> None:
        """Each of `streams` computes a share of the requests; without streams the default stream
        computes all."""
        self._gathered = GatheredAttention(layers, page_size)
        self._streams = streams

    def plan(self, batch: ForwardBatch) -> ProcessorPlan:
        """Implements `DecodeAttention.plan` as `GatheredAttention` does."""
        return ProcessorPlan(self._gathered.plan(batch), self._streams)
