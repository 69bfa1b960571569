"""Qwen 3, dense: each query and key head is normalised before the rotary embedding."""

from __future__ import annotations

from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.models.layer_kinds import Build, Layer


class Qwen3ForCausalLM(CausalLM):
    """Dense feed-forward blocks without biases."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        bias = build.config.attention_bias
        attention = SelfAttention(
            build.at("self_attn"), layer_id, self.rotary, qkv_bias=bias, output_bias=bias, qk_norm=True
        )
        return DecoderLayer(build, attention, self.make_mlp(build, layer_id))

    def make_mlp(self, build: Build, layer_id: int) -> Layer:
        """Return the feed-forward block of one layer."""
        return build.mlp("mlp", build.config.intermediate_size)
