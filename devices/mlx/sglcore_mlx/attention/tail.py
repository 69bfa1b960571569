"""Attention of draft tokens: over the KV cache of their request, and over draft tokens before them.

The keys and values of draft tokens are in arrays of their own, because a step may write to the KV
cache only once: a second write would copy it, as MLX writes in place only what nothing queued
reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from sglcore_mlx.attention.gathered import is_visible
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.models.contract import LayerShape
from sglcore_mlx.pool import entry_of


@dataclass(frozen=True, slots=True)
class Gathered:
    """The KV entries of R requests. `cells`: by layer, [R, S, *entry]; the first `lens` int32[R] of
    the S are valid, the others repeat the last one."""

    cells: list[mx.array]
    lens: mx.array


def gather(cells: Sequence[mx.array], page_table: mx.array, page_size: int, lens: mx.array) -> Gathered:
    """Gather the first `lens` int32[R] KV entries of each request from `cells`, by page_table
    int32[R, n]. Queues only."""
    columns = mx.arange(page_table.shape[1] * page_size, dtype=mx.int32)[None]
    places = mx.minimum(columns, mx.maximum(lens[:, None] - 1, 0))
    found = mx.take_along_axis(page_table, places // page_size, axis=1) * page_size + places % page_size
    return Gathered([each[found] for each in cells], lens)


class TailAttention:
    """The function `attend` of one forward over R requests with W tokens each, which follow the
    gathered KV entries and the draft tokens of earlier forwards.

    `tails`: by layer, the keys and values of draft tokens, [R, t, *entry]; empty before the first
    forward. A forward appends its own tokens. Every token sees all of them, so the tokens of
    one forward see each other, unless the batch has `visible` words: then a token sees those
    before it that its word names, as if the arrays were KV slots after the gathered ones.
    """

    def __init__(
        self, batch: ForwardBatch, layers: Sequence[LayerShape], gathered: Gathered, tails: Sequence[mx.array]
    ) -> None:
        """`batch`: the inputs of the forward."""
        self.batch, self.tails = batch, list(tails)
        self._layers, self._gathered = layers, gathered
        self._masks: dict[int | None, mx.array] = {}

    def attend(self, layer_id: int, q: mx.array, k: mx.array, v: mx.array | None, index: None = None) -> mx.array:
        """Implements `ForwardBatch.attend`: q [R * W, heads, D]; k, v [R * W, kv_heads, D]. There
        is no indexer."""
        before, layer = self._gathered.cells[layer_id], self._layers[layer_id]
        requests = before.shape[0]
        own = entry_of(k, v).reshape(requests, -1, *before.shape[2:]).astype(before.dtype)
        if layer_id == len(self.tails):
            self.tails.append(own)
        else:
            own = self.tails[layer_id] = mx.concatenate([self.tails[layer_id], own], axis=1)
        width = q.shape[0] // max(requests, 1)
        seen = self._seen(layer.sliding_window, before.shape[1], own.shape[1], width)
        mixed = attend_both(q.reshape(requests, width, *q.shape[1:]), before, own, seen, layer)
        return mixed.reshape(*q.shape[:2], mixed.shape[-1])

    def _seen(self, window: int | None, before: int, tail: int, width: int) -> mx.array:
        """Return bool [R, W, S + t + W]: which entries each token sees."""
        if window not in self._masks:
            lens = self._gathered.lens[:, None]
            columns, steps = mx.arange(before, dtype=mx.int32)[None], mx.arange(tail, dtype=mx.int32)[None]
            places = mx.concatenate([mx.where(columns < lens, columns, -1), lens + steps], axis=1)[:, None]
            ends = (lens + mx.arange(tail - width, tail, dtype=mx.int32)[None])[:, :, None]
            first = mx.zeros_like(ends) if window is None else mx.maximum(ends - (window - 1), 0)
            self._masks[window] = (places >= first) & self._of_branches(ends - places)
        return self._masks[window]

    def _of_branches(self, before: mx.array) -> mx.array:
        """Return bool, by the `visible` words of the batch, if any: which entries, `before` int32
        [R, W, S + t] places before each token, belong to its branch."""
        words = self.batch.visible
        if words is None:
            return mx.array(True)
        return (before >= 0) & is_visible(words.reshape(*before.shape[:2], 1), before)


def attend_both(q: mx.array, before: mx.array, tail: mx.array, seen: mx.array, layer: LayerShape) -> mx.array:
    """Attend with q [R, W, heads, D] over `before` [R, S, *entry] and `tail` [R, t, *entry], in one
    softmax; `seen` bool [R, W, S + t]. Returns [R, W, heads, value D] in q's dtype.

    The softmax is in float32. Neither array of keys and values is copied. Queues only."""
    requests, width, heads, size = q.shape
    kinds, each = layer.num_kv_heads, heads // layer.num_kv_heads
    shared = (q * layer.scale).reshape(requests, width, kinds, each, size).swapaxes(1, 2)
    shared = shared.reshape(requests, kinds, width * each, size)
    parts = [layer.parts(before), layer.parts(tail)]
    scores = mx.concatenate([shared @ keys.transpose(0, 2, 3, 1) for keys, _ in parts], axis=-1)
    scores = scores.astype(mx.float32)
    if layer.softcap is not None:
        scores = layer.softcap * mx.tanh(scores / layer.softcap)
    scores = mx.where(mx.repeat(seen, each, axis=1)[:, None], scores, -mx.inf)
    if layer.sinks is not None:
        # A row is token after token, each with the heads of one KV head.
        sinks = mx.tile(layer.sinks.astype(mx.float32).reshape(kinds, each), (1, width))[None, :, :, None]
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights, first = mx.softmax(scores, axis=-1).astype(q.dtype), before.shape[1]
    shares = weights[..., :first], weights[..., first : first + tail.shape[1]]
    mixed = shares[0] @ parts[0][1].swapaxes(1, 2) + shares[1] @ parts[1][1].swapaxes(1, 2)
    return mixed.reshape(requests, kinds, width, each, -1).swapaxes(1, 2).reshape(requests, width, heads, -1)
