"""Gemma 1: Llama's layers with scaled embeddings, norms that add 1 to their weights, and GELU in
the gated block."""

from __future__ import annotations

from typing import ClassVar

from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.models.layer_kinds import Build


class GemmaForCausalLM(CausalLM):
    """`attention_bias` of the configuration adds biases to all four attention projections."""

    norm_offset: ClassVar[float | None] = 1.0

    @property
    def embedding_scale(self) -> float:
        """The factor of embeddings: the square root of the hidden size."""
        return self.config.hidden_size**0.5

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        config, bias = build.config, build.config.attention_bias
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary, qkv_bias=bias, output_bias=bias)
        mlp = build.mlp("mlp", config.intermediate_size)
        return DecoderLayer(build, attention, mlp, self.norm_offset)
