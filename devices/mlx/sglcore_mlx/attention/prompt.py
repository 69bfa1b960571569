"""Attention of rows that bring several tokens: one call of `mx.fast` a row, over its own tokens or its gathered cells."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore_mlx.models.contract import LayerShape


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Tokens [start, end) of the step, after `prefix` computed ones; `cells` int32 [prefix + end - start] of them all."""

    start: int
    end: int
    prefix: int
    cells: NDArray[np.int32]

    def forward(self, q: mx.array, k: mx.array, v: mx.array, kv: mx.array, layer: LayerShape) -> mx.array:
        """[L, heads, D] of the row's tokens in q [T, heads, D] and k, v [T, kv_heads, D]; kv has them already."""
        own = slice(self.start, self.end)
        count = self.end - self.start
        first = 0 if layer.sliding_window is None else max(self.prefix - layer.sliding_window + 1, 0)
        if self.prefix:
            found = kv[mx.array(self.cells[first:])]
            keys, values = found[:, 0], found[:, 1]
        else:
            keys, values = k[own], v[own]
        mask = self._mask(count, first, layer.sliding_window)
        mixed = mx.fast.scaled_dot_product_attention(
            _heads_first(q[own]), _heads_first(keys), _heads_first(values), scale=layer.scale, mask=mask
        )
        return mixed[0].swapaxes(0, 1)

    def _mask(self, count: int, first: int, window: int | None) -> mx.array | str:
        """ "causal" ends at the last key; with a window, bool [L, S]."""
        if window is None or self.prefix + count <= window:
            return "causal"
        places = mx.arange(self.prefix, self.prefix + count, dtype=mx.int32)[:, None]
        columns = mx.arange(first, self.prefix + count, dtype=mx.int32)[None]
        return (columns <= places) & (columns > places - window)


def _heads_first(x: mx.array) -> mx.array:
    """[L, heads, D] to [1, heads, L, D]."""
    return x.swapaxes(0, 1)[None]
