"""Llama 1 to 3, and the many models with its layers."""

from __future__ import annotations

from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.models.layer_kinds import Build


class LlamaForCausalLM(CausalLM):
    """`attention_bias` of the configuration adds biases to all four attention projections,
    `mlp_bias` to the feed-forward block."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        config, bias = build.config, build.config.attention_bias
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary, qkv_bias=bias, output_bias=bias)
        return DecoderLayer(build, attention, build.mlp("mlp", config.intermediate_size, config.mlp_bias))
