"""The target's features for a drafter.

Its hidden states, or the residual stream before some of its layers.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.model_runner import Model


@runtime_checkable
class LayeredModel(Protocol):
    """A model with the forward `finish_both(run_layers(embed(batch), 0, len(layers)))[0]`."""

    @property
    def layers(self) -> tuple[Any, ...]:
        """Its layers, in order."""
        ...

    @property
    def attention_layers(self) -> tuple[Attention, ...]:
        """The layers with attention, indexed by their id."""
        ...

    @property
    def feature_size(self) -> int:
        """Elements F per token that a layer passes to the next."""
        ...

    def embed(self, batch: ForwardBatch, /) -> Any:
        """Return the input state of the first layer.

        Its `hidden` has F elements per token; `residual` has the same shape and is not yet added,
        or is None.
        """
        ...

    def run_layers(self, state: Any, first: int, last: int, /) -> Any:
        """Return the state after the layers first <= i < last."""
        ...

    def finish_both(self, state: Any, /) -> tuple[Tensor, Tensor]:
        """Return hidden states [T, H] after the last norm, and before it."""
        ...

    def logits(self, hidden: Tensor, /) -> Tensor:
        """Return float32 [N, vocab] for [N, H]."""
        ...

    def embed_ids(self, ids: Tensor, /) -> Tensor:
        """Return the embeddings [T, H] of ids [T], in the form of the batch's `input_embeds`."""
        ...


class FeatureModel:
    """A model that also returns the residual sums before some of its layers.

    The output of a forward is [T, H + feature_size].
    """

    def __init__(self, model: LayeredModel, aux_layers: tuple[int, ...]) -> None:
        """`aux_layers`: layer indices, ascending; the index after the last layer means before the
        last norm.
        """
        self._model = model
        self._aux_layers = aux_layers
        self.feature_size = len(aux_layers) * model.feature_size
        self.attention_layers = model.attention_layers

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Run one forward; return hidden states, then features: [T, H + feature_size]."""
        return self.with_norm_inputs(batch)[0]

    def with_norm_inputs(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Run one forward; return its output as a call does, and the inputs [T, H] of the last
        norm.
        """
        found: list[Tensor] = []
        model, first = self._model, 0
        state = model.embed(batch)
        for layer in self._aux_layers:
            state = model.run_layers(state, first, layer)
            # A layer may overwrite its input.
            summed = state.hidden.clone() if state.residual is None else state.hidden + state.residual
            found.append(summed.flatten(1))
            first = layer
        hidden, before = model.finish_both(model.run_layers(state, first, len(model.layers)))
        return torch.cat([hidden, *found], -1), before

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [N, vocab] for N rows of a forward's output [N, H + feature_size]."""
        return self._model.logits(hidden[:, : -self.feature_size].contiguous())

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Return the embeddings [T, H] of ids [T], in the form of the batch's `input_embeds`."""
        return self._model.embed_ids(ids)


def with_features(model: Model, aux_layers: tuple[int, ...]) -> Model:
    """Return a `FeatureModel` that also returns the sums before these layers, ascending; the model
    itself if there are none.

    Raises ConfigError if the model cannot run layer by layer.
    """
    if not aux_layers:
        return model
    if not isinstance(model, LayeredModel):
        raise ConfigError(
            f"the draft reads the inputs of the model's layers {aux_layers}, and {type(model).__name__} runs as "
            "a whole",
            remedy="--model-impl native, if sglcore implements the model, or another draft",
        )
    return FeatureModel(model, aux_layers)


def features_of(output: Tensor, size: int | None) -> Tensor:
    """Return the features [T, F] in a forward's output: its last `size` columns (None: all)."""
    return output if size is None else output[:, output.shape[-1] - size :]
