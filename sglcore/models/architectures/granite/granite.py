"""Granite 3: Llama's layers with four multipliers: for embeddings, scores, the addends of the
residual sum, and logits."""

from __future__ import annotations

from typing import ClassVar

from sglcore.models.decoder import CausalLM, DecoderLayer, LayerState, Mixer, SelfAttention
from sglcore.models.layer_kinds import Array, Batch, Build, Layer


class GraniteLayer(DecoderLayer):
    """A `DecoderLayer` that multiplies the results of attention and feed-forward by
    `residual_multiplier` before they are added to the residual sum."""

    __slots__ = ("multiplier",)

    def __init__(self, build: Build, self_attn: Mixer, mlp: Layer) -> None:
        super().__init__(build, self_attn, mlp)
        self.multiplier = build.config.options.get("residual_multiplier", 1.0)

    def __call__(self, hidden: Array, residual: Array | None, batch: Batch) -> tuple[Array, Array]:
        """Return `hidden` [T, H] and `residual` [T, H] after this layer, from those before it
        (`residual` None before the first layer). Both arguments may be overwritten; do not use them
        afterwards.
        """
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, batch) * self.multiplier
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden) * self.multiplier, residual


class GraniteForCausalLM(CausalLM):
    """`attention_bias` of the configuration adds biases to all four attention projections,
    `mlp_bias` to the feed-forward block."""

    calls_library = True
    knows: ClassVar[frozenset[str]] = frozenset(
        {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}
    )

    def make_layer(self, build: Build, layer_id: int) -> GraniteLayer:
        bias = build.config.attention_bias
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary, qkv_bias=bias, output_bias=bias)
        return GraniteLayer(build, attention, self.make_mlp(build))

    def make_mlp(self, build: Build) -> Layer:
        """Return the feed-forward block."""
        return build.mlp("mlp", build.config.intermediate_size, build.config.mlp_bias)

    def embed(self, batch: Batch) -> LayerState:
        """Return the first layer's input: token embeddings or the batch's own, multiplied by
        `embedding_multiplier`.
        """
        hidden, residual, batch = super().embed(batch)
        return LayerState(hidden * self.config.options.get("embedding_multiplier", 1.0), residual, batch)

    def logits(self, hidden: Array) -> Array:
        """[N, H] to float32 [N, vocab], divided by `logits_scaling`."""
        return super().logits(hidden) / self.config.options.get("logits_scaling", 1.0)
