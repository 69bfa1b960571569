"""The interface of models to the worker: pure functions of arrays, and the shapes of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from sglcore.checkpoint.model_config import ModelConfig
from sglcore_mlx.forward_batch import Advance, ForwardBatch


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The compressed blocks of a layer (DeepSeek-V4): `ratio` tokens become one row. With `series`
    2 a row also depends on the block before. `sizes`: elements of a row of the layer, and of a key
    of its indexer, which chooses `top_k` blocks; without an indexer one size, and `top_k` 0."""

    ratio: int
    series: int
    sizes: tuple[int, ...]
    top_k: int = 0

    @property
    def span(self) -> int:
        """The number of tokens on which a row depends."""
        return self.ratio * self.series


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The attention of one layer, as its model declares it: numbers of query heads and of KV heads,
    head size, sliding window (tokens that a query sees, itself included; None: all), scale, whether
    it is causal, softcap and sinks (None: none)."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Elements of a head."""
    sliding_window: int | None
    """Number of tokens that a query sees, including itself. None: all."""
    scale: float
    """Factor of the scores q k^T."""
    causal: bool = True
    """A token sees itself and earlier tokens. False: also later ones, and a window extends in both
    directions."""
    softcap: float | None = None
    """With softcap c a scaled score s becomes c * tanh(s / c). None: no softcap."""
    sinks: mx.array | None = None
    """[heads]: scores of an additional key without a value. None: no sinks."""
    value_dim: int | None = None
    """Latent attention: the first elements of a key are the value too, and nothing else is stored.
    None: values are stored in addition to keys, with the same size."""

    top_k: int = 0
    """A query sees the `top_k` tokens that an indexer scores highest: this layer's, or that of a
    layer before. 0: all."""
    index_dim: int = 0
    """Elements of the indexer's key, which a cache entry has after its key. 0: the layer has no
    indexer of its own."""
    blocks: BlockShape | None = None
    """The compressed blocks that a query sees in addition to its sliding window. None: none."""

    @property
    def entry(self) -> tuple[int, int, int]:
        """The shape of a token's cache entry: keys and values, or keys only; KV heads; elements."""
        return (2 if self.value_dim is None else 1), self.num_kv_heads, self.head_dim + self.index_dim

    def index_keys(self, entries: mx.array) -> mx.array:
        """Return the indexer's keys [..., index_dim] of cache entries [..., *entry]."""
        return entries[..., 0, 0, self.head_dim :]

    def parts(self, entries: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and the values [..., kv_heads, D] of cache entries [..., *entry]."""
        keys = entries[..., 0, :, : self.head_dim]
        return keys, entries[..., 1, :, :] if self.value_dim is None else keys[..., : self.value_dim]


@dataclass(frozen=True, slots=True)
class StateShape:
    """Shape and dtype of one array of a recurrent layer's state, for one request."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


class SlicedModel(Protocol):
    """A model with a forward that can be split: `embed`, `run_layers` over all layers,
    `finish_both`."""

    @property
    def sliced_layers(self) -> int:
        """The number of layers."""
        ...

    def embed(self, batch: Any) -> Any:
        """Return the state that goes into the first layer; its form is the model's own."""
        ...

    def run_layers(self, state: Any, first: int, last: int) -> Any:
        """Return the state after the layers first <= i < last; the argument `state` must not be
        used again."""
        ...

    def finish_both(self, state: Any) -> tuple[mx.array, mx.array]:
        """Return hidden states [T, H] after the last norm, and before it."""
        ...


class Model(Protocol):
    """A model that a worker runs. No method evaluates or reads arrays on the host, so all can be
    compiled.

    `states`: state shapes of each layer with a recurrent state, by state id; `advances`: its
    recurrence. `num_bytes`: size of
    all weights; `quantization`: their format ("none", "4-bit, groups of 64", ...).
    """

    config: ModelConfig
    dtype: mx.Dtype
    layers: tuple[LayerShape, ...]
    states: tuple[tuple[StateShape, ...], ...]
    advances: tuple[Advance, ...]
    num_bytes: int
    quantization: str

    @property
    def sliced_layers(self) -> int:
        """The number of layers if a forward can run in slices of layers; 0: only whole."""
        ...

    @property
    def sliced(self) -> SlicedModel:
        """The model as one that runs slices of layers; to be used only if `sliced_layers` is not
        0."""
        ...

    def __call__(self, batch: ForwardBatch) -> mx.array:
        """Return hidden states [T, H] after the last norm; keys, values and states go through the
        functions of the batch."""
        ...

    @property
    def against_norm_inputs(self) -> str:
        """Why `with_norm_inputs` raises; empty if it does not."""
        ...

    def with_norm_inputs(self, batch: ForwardBatch) -> tuple[mx.array, mx.array]:
        """Return hidden states [T, H] after the last norm, and before it. Raises `ConfigError` if
        the model is not run by layers."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits float32 [N, V] of hidden states [N, H]. An encoder raises `ConfigError`."""
        ...

    def classify(self, pooled: mx.array) -> mx.array:
        """Return scores [B, labels] of pooled hidden states [B, H]. Raises `ConfigError` if the
        model has no classification head."""
        ...
