"""Attention without a KV cache: a sequence's tokens attend to each other, bidirectional or
causal."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore_mlx.attention.dense import attend
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.models.contract import LayerShape


class EncoderRows:
    """Attention of a step with B whole sequences: `attend` pads them to the longest, so that a
    layer is one call."""

    def __init__(self, batch: ForwardBatch, offsets: NDArray[np.int32], layers: tuple[LayerShape, ...]) -> None:
        """`batch`: the inputs of the step. `offsets` int32 [B + 1]: where each sequence's tokens
        begin, and the end of the last; B is at least 1."""
        self.batch = batch
        lengths = np.diff(offsets)
        columns = np.arange(int(lengths.max()), dtype=np.int32)[None]
        inside = columns < lengths[:, None]
        self._layers = layers
        self._padded = mx.array(np.where(inside, offsets[:-1, None] + columns, offsets[:-1, None]))
        self._inside = inside[:, None, None]
        self._masks = {key: self._mask(*key) for key in {(layer.sliding_window, layer.causal) for layer in layers}}
        self._flat = mx.array(np.flatnonzero(inside.reshape(-1)).astype(np.int32))

    def attend(self, layer_id: int, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """Return [T, heads, D] from q [T, heads, D] and k, v [T, kv_heads, D], for layer number
        `layer_id`; T: the tokens of all sequences, without padding. Builds the lazy graph only."""
        layer = self._layers[layer_id]
        mask = self._masks[layer.sliding_window, layer.causal]
        q, k, v = (x[self._padded].swapaxes(1, 2) for x in (q, k, v))
        mixed = attend(q, k, v, mask, layer).swapaxes(1, 2)
        return mixed.reshape(-1, *mixed.shape[2:])[self._flat]

    def _mask(self, window: int | None, causal: bool) -> mx.array:
        """Return bool [B, 1, 1 or n, n], n the longest sequence: the keys that each token sees. A
        window without `causal` reaches window - 1 tokens to both sides."""
        mask, count = self._inside, self._inside.shape[-1]
        if causal or window is not None:
            back = np.arange(count)[:, None] - np.arange(count)
            reach = count if window is None else window
            mask = mask & (back < reach) & (back >= (0 if causal else 1 - reach))
        return mx.array(mask.astype(np.int8)).astype(mx.bool_)
