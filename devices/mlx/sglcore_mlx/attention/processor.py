"""Attention over gathered cells where MLX runs on the processor: heads that share keys are one
product, and every stream takes a share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from sglcore_mlx.attention.contract import AttentionFacts, DecodeRows
from sglcore_mlx.attention.dense import attend
from sglcore_mlx.attention.gathered import GatheredAttention, GatheredPlan
from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class ProcessorPlan:
    """What the gather path worked out, and the streams that share it."""

    gathered: GatheredPlan
    streams: tuple[mx.Stream, ...]

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """[B * N, heads, D] of q [B * N, heads, D] over kv [cells, 2, kv_heads, D]."""
        rows, count = self.gathered.cells.shape[0], len(self.streams)
        queries = q.reshape(rows, -1, *q.shape[1:])
        return self._shared(queries, kv, layer, rows, count).reshape(q.shape)

    def _shared(self, q: mx.array, kv: mx.array, layer: LayerShape, rows: int, count: int) -> mx.array:
        """[B, N, heads, D], on as many streams as take a share of the requests."""
        if not count or rows < count:
            return self._attend(q, kv, layer, slice(0, rows))
        mixed: list[mx.array] = []
        for number, stream in enumerate(self.streams):
            share = slice(number * rows // count, (number + 1) * rows // count)
            with mx.stream(stream):
                mixed.append(self._attend(q[share], kv, layer, share))
        return mx.concatenate(mixed)

    def _attend(self, q: mx.array, kv: mx.array, layer: LayerShape, rows: slice) -> mx.array:
        """The queries [b, N, heads, D] of some requests; sums of weights are in float32."""
        found, mask = kv[self.gathered.cells[rows]], self.gathered.masks[layer.sliding_window][rows]
        count, width, heads, size = q.shape
        if layer.softcap is not None or layer.sinks is not None:
            keys, values = found[:, :, 0].swapaxes(1, 2), found[:, :, 1].swapaxes(1, 2)
            return attend(q.swapaxes(1, 2), keys, values, mask, layer).swapaxes(1, 2)
        kinds, each = layer.num_kv_heads, heads // layer.num_kv_heads
        shared = q.reshape(count, width, kinds, each, size).swapaxes(1, 2).reshape(count, kinds, width * each, size)
        scores = (shared * layer.scale) @ found[:, :, 0].transpose(0, 2, 3, 1)
        seen = mask if width == 1 else mx.repeat(mask, each, axis=2)
        weights = mx.softmax(mx.where(seen, scores.astype(mx.float32), -mx.inf), axis=-1).astype(q.dtype)
        mixed = (weights @ found[:, :, 1].swapaxes(1, 2)).reshape(count, kinds, width, each, size)
        return mixed.swapaxes(1, 2).reshape(q.shape)


class ProcessorAttention:
    """`mx.fast` attention is no kernel of its own on a processor; this asks for fewer operations
    than it is made of. `GatheredAttention` is its reference."""

    facts: ClassVar[AttentionFacts] = AttentionFacts(compute=("cpu",))

    def __init__(self, layers: Sequence[LayerShape], page_size: int, streams: tuple[mx.Stream, ...] = ()) -> None:
        """`streams` each take a share of the requests; without any, the default stream takes
        all."""
        self._gathered = GatheredAttention(layers, page_size)
        self._streams = streams

    def plan(self, rows: DecodeRows) -> ProcessorPlan:
        """As the gather path's."""
        return ProcessorPlan(self._gathered.plan(rows), self._streams)
