"""Attention of an encoder: every token of a row attends to all of its row; no cells."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore_mlx.models.contract import LayerShape


class EncoderRows:
    """B rows of whole sequences, padded to the longest for one call a layer."""

    def __init__(self, offsets: NDArray[np.int32], layers: tuple[LayerShape, ...]) -> None:
        """`offsets` int32 [B + 1]: where each row's tokens begin."""
        lengths = np.diff(offsets)
        columns = np.arange(int(lengths.max()), dtype=np.int32)[None]
        inside = columns < lengths[:, None]
        self._layers = layers
        self._padded = mx.array(np.where(inside, offsets[:-1, None] + columns, offsets[:-1, None]))
        self._mask = mx.array(inside[:, None, None].astype(np.int8)).astype(mx.bool_)
        self._flat = mx.array(np.flatnonzero(inside.reshape(-1)).astype(np.int32))

    def attend(self, layer_id: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """[T, heads, D] of q [T, heads, D] and k, v [T, kv_heads, D]."""
        rows = [x[self._padded].swapaxes(1, 2) for x in (q, k, v)]
        scale = self._layers[layer_id].scale
        mixed = mx.fast.scaled_dot_product_attention(*rows, scale=scale, mask=self._mask).swapaxes(1, 2)
        return mixed.reshape(-1, *mixed.shape[2:])[self._flat]
