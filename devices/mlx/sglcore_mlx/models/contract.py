"""What a worker sees of a model: pure functions of arrays, and the geometry of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from sglcore.checkpoint.config import ModelConfig
from sglcore_mlx.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The attention of one layer, as its model declares it."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Elements of a head."""
    sliding_window: int | None
    """Tokens that a query sees, itself among them. None: all."""
    scale: float
    """What scores are multiplied with."""
    causal: bool = True
    """A token sees itself and the tokens before it. False: it sees those after it too, and the
    window reaches both ways."""
    softcap: float | None = None
    """c bends a scaled score s to c * tanh(s / c). None: scores stay as they are."""
    sinks: mx.array | None = None
    """[heads]: the scores of one more key, which has no value. None: there is none."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One array of what a layer keeps of a request."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


class SlicedModel(Protocol):
    """A model whose forward is `embed`, `run_layers` over all layers, and `finish`."""

    @property
    def sliced_layers(self) -> int:
        """How many layers it has."""
        ...

    def embed(self, batch: Any) -> Any:
        """What the first layer starts from."""
        ...

    def run_layers(self, state: Any, first: int, last: int) -> Any:
        """The state after the layers first <= i < last; the one before is used up."""
        ...

    def finish(self, state: Any) -> mx.array:
        """Hidden states [T, H] after the last norm."""
        ...


class Model(Protocol):
    """A model that a worker drives. Nothing here evaluates or reads on the host, so all of it can
    be compiled.

    `states` are what each layer with a state keeps of a request, by the layer's id. `num_bytes` is
    the size of all weights; `quantization` says their form ("none", "4-bit, groups of 64", ...).
    """

    config: ModelConfig
    dtype: mx.Dtype
    layers: tuple[LayerShape, ...]
    states: tuple[tuple[StateShape, ...], ...]
    num_bytes: int
    quantization: str

    @property
    def sliced_layers(self) -> int:
        """A forward may be run by slices of so many layers; 0: only whole."""
        ...

    @property
    def sliced(self) -> SlicedModel:
        """What runs them."""
        ...

    def __call__(self, batch: ForwardBatch) -> mx.array:
        """T tokens to hidden states [T, H] after the last norm."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Hidden states [N, H] to float32 [N, V]; an encoder raises `ConfigError`."""
        ...

    def classify(self, pooled: mx.array) -> mx.array:
        """Pooled hidden states [B, H] to [B, labels]; raises `ConfigError` without a head for
        that."""
        ...
