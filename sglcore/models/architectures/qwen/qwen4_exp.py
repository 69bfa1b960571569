"""Qwen4-Exp: Qwen 3.5's layers around several residual streams, with embeddings of n-grams in some.

Attention is dense, so the context ends where the checkpoint's layers would select tokens. The
vision part is not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.checkpoint.ngram_config import NgramConfig, StreamConfig, ngram_config, stream_config
from sglcore.checkpoint.recurrent_config import FULL, LINEAR, delta_net_config, layer_kinds
from sglcore.core.errors import ConfigError
from sglcore.models.architectures.qwen.qwen3_5 import Qwen35ForCausalLM
from sglcore.models.architectures.qwen.qwen3_next import GatedAttention
from sglcore.models.decoder import LayerState, Mixer, Recurrent
from sglcore.models.layer_kinds import Architecture, Array, Batch, Build, HyperHead, Layer, Stateful


class StreamLayer:
    """The layer's n-grams are added to the streams. Then a mixer and a feed-forward block: before
    each, the streams are combined into one; after it, its result is added to each stream."""

    __slots__ = ("attn_hyper_connection", "mlp", "mlp_hyper_connection", "ple", "self_attn")

    def __init__(self, build: Build, streams: StreamConfig, self_attn: Mixer, mlp: Layer, ple: Stateful | None) -> None:
        """`ple`: the embeddings of n-grams; None: the layer has none."""
        numbers = streams.count, streams.rank
        self.ple = ple
        self.attn_hyper_connection = build.gated_residual("attn_hyper_connection", *numbers)
        self.self_attn = self_attn
        self.mlp_hyper_connection = build.gated_residual("mlp_hyper_connection", *numbers)
        self.mlp = mlp

    def __call__(self, hidden: Array, residual: None, batch: Batch) -> tuple[Array, None]:
        """Return the streams [T, n, H] after this layer, from the streams `hidden` before it; there
        is no residual sum."""
        if self.ple is not None:
            hidden = hidden + self.ple(hidden, batch)
        x, mix = self.attn_hyper_connection.narrow(hidden)
        hidden = self.attn_hyper_connection.widen(self.self_attn(x, batch), hidden, mix)
        x, mix = self.mlp_hyper_connection.narrow(hidden)
        return self.mlp_hyper_connection.widen(self.mlp(x), hidden, mix), None


class Qwen4ExpForCausalLM(Qwen35ForCausalLM):
    """Layers pass all streams [T, n, H] to the next; the last norm is that of the streams."""

    ignored = (*Qwen35ForCausalLM.ignored, r"model\.layers\.\d+\.self_attn\.indexer\..*")
    against_norm_inputs = "its last norm is that of several streams for each token"
    hyper_connection_mixer: HyperHead
    streams: StreamConfig
    ngrams: NgramConfig | None

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.feature_size *= self.streams.count
        layers = cast("tuple[StreamLayer, ...]", self.layers)
        parts = [part for layer in layers for part in (layer.ple, layer.self_attn.state)]
        self.state_layers = tuple(part for part in parts if part is not None)

    def _check(self, config: ModelConfig) -> None:
        super()._check(config)
        self.streams, self.ngrams = stream_config(config), ngram_config(config)
        self.previous_ids = 0 if self.ngrams is None else self.ngrams.order - 1
        gate = config.words.get("output_gate_type", config.hidden_act)
        if gate not in ("silu", "sigmoid"):
            raise ConfigError(f"{config.file} has output_gate_type {gate!r}", wanted="'silu' or 'sigmoid'")
        if self.ngrams is not None and config.pooling is not None:
            raise ConfigError(
                f"{config.architecture} embeds n-grams, which is not supported yet for a model that embeds texts",
                remedy="--task generate",
            )

    def make_layer(self, build: Build, layer_id: int) -> StreamLayer:
        """Return layer `layer_id`; states count the n-grams and the delta rule of each layer, in
        this order."""
        kinds, tables = layer_kinds(build.config), () if self.ngrams is None else self.ngrams.layers
        state_id = kinds[:layer_id].count(LINEAR) + sum(table < layer_id for table in tables)
        ple = None
        if self.ngrams is not None and layer_id in tables:
            place = tables.index(layer_id)
            ple = build.at("ple").ngram_embedding(state_id, self.ngrams, place, self.streams.count)
            state_id += 1
        if kinds[layer_id] == FULL:
            mixer = GatedAttention(build.at("self_attn"), kinds[:layer_id].count(FULL), self.rotary)
        else:
            mixer = self._make_delta_net(build.at("linear_attn"), state_id)
        return StreamLayer(build, self.streams, mixer, self.make_mlp(build, layer_id), ple)

    def _make_delta_net(self, build: Build, state_id: int) -> Recurrent:
        config = build.config
        net = replace(delta_net_config(config), gate=config.words.get("output_gate_type", config.hidden_act))
        projection, output = self.make_projection(build, net), build.linear("out_proj", net.values, config.hidden_size)
        return Recurrent(build.gated_delta_net(state_id, net, projection, output))

    def make_norm(self, build: Build) -> Any:
        """Return the start and the end of the streams, in place of a norm after the last layer."""
        numbers = self.streams.count, self.streams.rank
        self.hyper_connection_mixer = build.gated_mixer("hyper_connection_mixer", *numbers)
        return self.hyper_connection_mixer

    def embed(self, batch: Batch) -> LayerState:
        """Return the first layer's input: every stream starts with the embedded tokens."""
        return LayerState(self.hyper_connection_mixer.begin(self.embed_tokens.embed(batch)), None, batch)

    def finish_both(self, state: LayerState) -> tuple[Array, Array]:
        """Return the hidden states [T, H], the combined streams, twice: no norm follows."""
        combined = self.hyper_connection_mixer.end(state.hidden)
        return combined, combined

    def with_norm_inputs(self, batch: Batch) -> tuple[Array, Array]:
        """Raise `ConfigError`, as `against_norm_inputs` says."""
        return Architecture.with_norm_inputs(self, batch)
