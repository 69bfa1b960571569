"""Prefill attention: one call per request, over its own new tokens, or over its gathered keys and
values if it has computed tokens before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore_mlx.attention.dense import attend
from sglcore_mlx.attention.indexed import chosen_mask
from sglcore_mlx.forward_batch import ForwardBatch, IndexQueries, part_of
from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Request number `row` of the step: its tokens [start, end), which follow `prefix` tokens with
    keys and values in the cache; `cells`: KV slots of all, int32 [prefix + end - start]."""

    row: int
    start: int
    end: int
    prefix: int
    cells: NDArray[np.int32]

    def plan(self, layers: Sequence[LayerShape], batch: ForwardBatch) -> PromptPlan:
        """Return the plan of this request for all layers, with keys and mask made once for each
        sliding window; `batch`: the inputs of the step."""
        windows = dict.fromkeys(layer.sliding_window for layer in layers)
        own = part_of(batch, slice(self.row, self.row + 1), slice(self.start, self.end))
        return PromptPlan(self.start, self.end, own, {window: self._seen(window) for window in windows})

    def _seen(self, window: int | None) -> Seen:
        first = 0 if window is None else max(self.prefix - window + 1, 0)
        cells = mx.array(self.cells[first:]) if self.prefix else None
        end = self.prefix + self.end - self.start
        if window is None or end <= window:
            return Seen(cells, "causal")
        places = mx.arange(self.prefix, end, dtype=mx.int32)[:, None]
        columns = mx.arange(first, end, dtype=mx.int32)[None]
        return Seen(cells, (columns <= places) & (columns > places - window))


@dataclass(frozen=True, slots=True)
class Seen:
    """The keys for a request's L queries. `cells` int32 [S]: their KV slots (None: the keys of the
    step itself, because nothing is cached). `mask`: bool [L, S], True where a query sees a key, or
    "causal" (the last query sees the last key)."""

    cells: mx.array | None
    mask: mx.array | str


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A request's tokens [start, end) of the step, their part of its inputs, and for each sliding
    window (None: none) their keys and mask."""

    start: int
    end: int
    batch: ForwardBatch
    seen: Mapping[int | None, Seen]

    def choose(self, index: IndexQueries, k: mx.array, kv: mx.array, layer: LayerShape) -> mx.array | None:
        """Return bool [L, S]: the tokens that an indexer selects for each of the request's tokens;
        None: they see all earlier ones. Arguments as in `forward`."""
        seen = self.seen[None]
        entries = k[self.start : self.end, None] if seen.cells is None else kv[seen.cells]
        count, total = self.end - self.start, entries.shape[0]
        if total <= layer.top_k:
            return None
        causal = mx.arange(total)[None] <= mx.arange(total - count, total)[:, None]
        own = index.of(slice(self.start, self.end))
        return chosen_mask(own, layer.index_keys(entries), causal, layer.top_k)

    def forward(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array | None,
        kv: mx.array,
        layer: LayerShape,
        chosen: mx.array | None = None,
    ) -> mx.array:
        """Return [L, heads, D] for the request's L tokens, out of the whole step's q [T, heads, D]
        and k, v [T, kv_heads, D]. kv, the layer's KV cache, must contain their keys and values
        already. `chosen`: the result of `choose`."""
        own, seen = slice(self.start, self.end), self.seen[layer.sliding_window]
        if seen.cells is not None:
            keys, values = layer.parts(kv[seen.cells])
        elif v is None:
            keys, values = layer.parts(k[own, None])
        else:
            keys, values = k[own], v[own]
        mask = seen.mask if chosen is None else chosen
        mixed = attend(_heads_first(q[own]), _heads_first(keys), _heads_first(values), mask, layer)
        return mixed[0].swapaxes(0, 1)


def _heads_first(x: mx.array) -> mx.array:
    """Transpose [L, heads, D] to [1, heads, L, D]."""
    return x.swapaxes(0, 1)[None]
