"""A target model that also returns the features that its draft model reads."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from sglcore.core.errors import ConfigError
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.models.contract import Model


class FeatureModel:
    """A `Model` with hidden states [T, H + F]: after them, the residual sums before the layers
    `aux_layers`, which are the features of a draft model. `logits` reads the first H."""

    sliced_layers = 0

    def __init__(self, model: Model, aux_layers: tuple[int, ...]) -> None:
        """`aux_layers`: layer indices, ascending; the index after the last layer means before the
        last norm. Raises ConfigError if the model does not run layer by layer."""
        if not model.sliced_layers:
            raise ConfigError(
                f"the draft reads the inputs of the model's layers {aux_layers}, and {model.config.architecture} "
                "runs as a whole",
                remedy="use another draft",
            )
        self.config, self.dtype = model.config, model.dtype
        self.layers, self.states, self.advances = model.layers, model.states, model.advances
        self.num_bytes, self.quantization = model.num_bytes, model.quantization
        self.classify, self.sliced = model.classify, model.sliced
        self._model, self._aux_layers = model, aux_layers

    def __call__(self, batch: ForwardBatch) -> mx.array:
        """Return hidden states after the last norm, then features: [T, H + F]."""
        return self.with_norm_inputs(batch)[0]

    @property
    def against_norm_inputs(self) -> str:
        """Why `with_norm_inputs` raises; empty if it does not."""
        return self._model.against_norm_inputs

    def with_norm_inputs(self, batch: ForwardBatch) -> tuple[mx.array, mx.array]:
        """Return hidden states after the last norm, then features: [T, H + F]; and hidden states
        [T, H] before the last norm."""
        layered, first, found = self.sliced, 0, list[mx.array]()
        state: Any = layered.embed(batch)
        for layer in self._aux_layers:
            state = layered.run_layers(state, first, layer)
            own = state.hidden if state.residual is None else state.hidden + state.residual
            found.append(own.reshape(own.shape[0], -1))
            first = layer
        hidden, before = layered.finish_both(layered.run_layers(state, first, layered.sliced_layers))
        return mx.concatenate([hidden, *found], axis=-1), before

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits float32 [N, V] of [N, H + F]."""
        return self._model.logits(hidden[:, : self.config.hidden_size])

    def features(self, hidden: mx.array) -> mx.array:
        """Return the features [N, F] in [N, H + F]."""
        return hidden[:, self.config.hidden_size :]
