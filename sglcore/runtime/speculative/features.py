"""What a target model gives a drafter of each token: its hidden states, or the streams before some of its layers."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sglcore.device.errors import ConfigError
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import Model


@runtime_checkable
class LayeredModel(Protocol):
    """A model whose forward is `finish(run_layers(embed(batch), 0, len(layers)))`."""

    @property
    def layers(self) -> tuple[Any, ...]:
        """Its layers, in order."""
        ...

    @property
    def attention_layers(self) -> tuple[Attention, ...]:
        """Those that attend, indexed by their id."""
        ...

    @property
    def feature_size(self) -> int:
        """Numbers F that one layer hands to the next of each token."""
        ...

    def embed(self, batch: ForwardBatch, /) -> Any:
        """What the first layer starts from: `hidden` of F numbers a token, and as many of `residual`, to which they are not yet added,
        or None."""
        ...

    def run_layers(self, state: Any, first: int, last: int, /) -> Any:
        """The state after the layers first <= i < last."""
        ...

    def finish(self, state: Any, /) -> Tensor:
        """[T, H] after the last norm."""
        ...

    def logits(self, hidden: Tensor, /) -> Tensor:
        """float32 [N, vocab] from [N, H]."""
        ...

    def embed_ids(self, ids: Tensor, /) -> Tensor:
        """[T] to [T, H]."""
        ...


class FeatureModel:
    """A model whose forward gives, beside its hidden states, the sums that enter some of its layers, `feature_size` numbers:
    [T, H + feature_size]."""

    def __init__(self, model: LayeredModel, aux_layers: tuple[int, ...]) -> None:
        """`aux_layers`: numbers of layers, ascending; that after the last one is the sum before the last norm."""
        self._model = model
        self._aux_layers = aux_layers
        self.feature_size = len(aux_layers) * model.feature_size
        self.attention_layers = model.attention_layers

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """One forward."""
        found: list[Tensor] = []
        model, first = self._model, 0
        state = model.embed(batch)
        for layer in self._aux_layers:
            state = model.run_layers(state, first, layer)
            # A layer uses up what it is given.
            summed = state.hidden.clone() if state.residual is None else state.hidden + state.residual
            found.append(summed.flatten(1))
            first = layer
        hidden = model.finish(model.run_layers(state, first, len(model.layers)))
        return torch.cat([hidden, *found], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] from what a forward gave of N tokens."""
        return self._model.logits(hidden[:, : -self.feature_size].contiguous())

    def embed_ids(self, ids: Tensor) -> Tensor:
        """[T] to the rows [T, H] that the first layer takes."""
        return self._model.embed_ids(ids)


def with_features(model: Model, aux_layers: tuple[int, ...]) -> Model:
    """The model, or one that also gives the sums before these layers. Raises ConfigError for one without layers of its own."""
    if not aux_layers:
        return model
    if not isinstance(model, LayeredModel):
        raise ConfigError(
            f"the draft reads the model before its layers {aux_layers}, and {type(model).__name__} runs as a whole",
            remedy="--model-impl native, where there is a file, or another draft",
        )
    return FeatureModel(model, aux_layers)


def features_of(output: Tensor, size: int | None) -> Tensor:
    """[T, F] of a forward's output: its last `size` numbers of each token (None: all)."""
    return output if size is None else output[:, output.shape[-1] - size :]
