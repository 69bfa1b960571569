"""Attention over gathered keys and values, for any device and shape. The reference of the faster
backends.

Columns beyond a request's end repeat its last KV slot, so that data of other requests, even NaN,
never gets into a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from sglcore_mlx.attention.contract import AttentionFacts
from sglcore_mlx.attention.dense import attend
from sglcore_mlx.attention.indexed import highest, index_scores
from sglcore_mlx.forward_batch import ForwardBatch, IndexQueries
from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """The plan of `GatheredAttention`. `cells` int32 [B, S]: KV slots of each request, S the width
    of its page table in tokens; `masks`: for each sliding window (None: none), bool [B, 1, N, S],
    True where a query sees a KV slot."""

    cells: mx.array
    masks: Mapping[int | None, mx.array]

    def forward(self, q: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """Implements `AttentionPlan.forward`: gather keys and values of all requests, then
        attend."""
        keys, values = (part.swapaxes(1, 2) for part in layer.parts(kv[self.cells]))
        mask = self.masks[layer.sliding_window]
        queries = q.reshape(self.cells.shape[0], -1, *q.shape[1:]).swapaxes(1, 2)
        mixed = attend(queries, keys, values, mask, layer).swapaxes(1, 2)
        return mixed.reshape(*q.shape[:2], mixed.shape[-1])

    def choose(self, index: IndexQueries, kv: mx.array, layer: LayerShape) -> mx.array | None:
        """Implements `ChoosingPlan.choose`: int32 [B, N, top_k], columns of `cells`."""
        if self.cells.shape[1] <= layer.top_k:
            return None
        scores = index_scores(index, layer.index_keys(kv)[self.cells])
        return highest(mx.where(self.masks[None][:, 0], scores, -mx.inf), layer.top_k)

    def forward_chosen(self, q: mx.array, kv: mx.array, layer: LayerShape, chosen: mx.array) -> mx.array:
        """Implements `ChoosingPlan.forward_chosen`; reads the selected entries only."""
        cells = mx.take_along_axis(self.cells[:, None], chosen, axis=-1).reshape(q.shape[0], layer.top_k)
        seen = mx.take_along_axis(self.masks[None][:, 0], chosen, axis=-1).reshape(q.shape[0], 1, 1, layer.top_k)
        keys, values = (part.swapaxes(1, 2) for part in layer.parts(kv[cells]))
        return attend(q[:, :, None], keys, values, seen, layer)[:, :, 0]


class GatheredAttention:
    """Gathers each request's keys and values, then attends. Gathering moves the same bytes again
    that attention reads."""

    facts: ClassVar[AttentionFacts] = AttentionFacts()

    def __init__(self, layers: Sequence[LayerShape], page_size: int, streams: tuple[mx.Stream, ...] = ()) -> None:
        """`streams` are not used; of the layers only their sliding windows are."""
        self._windows = tuple(dict.fromkeys(layer.sliding_window for layer in layers))
        self._page_size = page_size

    def plan(self, batch: ForwardBatch) -> GatheredPlan:
        """Implements `DecodeAttention.plan`: compute the KV slots of every request, up to the width
        of the page table, and the masks of each query."""
        size, table = self._page_size, batch.pages_of_requests
        lens = batch.seq_lens.reshape(table.shape[0], -1)
        columns = mx.arange(table.shape[1] * size, dtype=mx.int32)[None]
        places = mx.minimum(columns, mx.max(lens, axis=1, keepdims=True) - 1)
        pages = mx.take_along_axis(table, places // size, axis=1)
        words = None if batch.visible is None else batch.visible.reshape(lens.shape)
        masks = {window: _mask(columns, lens, window, words) for window in self._windows}
        return GatheredPlan(pages * size + places % size, masks)


def _mask(columns: mx.array, lens: mx.array, window: int | None, visible: mx.array | None) -> mx.array:
    """Return bool [B, 1, N, S]: which of columns int32 [1, S] each query sees. lens int32 [B, N]:
    the tokens up to the query's own, which is the last it sees; visible int32 [B, N] as in
    `ForwardInputs`."""
    ends = lens[:, :, None]
    seen = columns < ends
    if window is not None:
        seen = seen & (columns >= ends - window)
    if visible is not None:
        seen = seen & is_visible(visible[:, :, None], ends - 1 - columns)
    return seen[:, None]


def is_visible(words: mx.array, before: mx.array) -> mx.array:
    """Return bool: whether rows with `words` int32, as `ForwardInputs.visible`, see the KV slot
    `before` int32 places before their own; arbitrary for a negative number. Broadcasts."""
    bits = words >> (31 - mx.clip(before, 0, 31))
    return (before > 31) | ((bits & 1) != 0)
