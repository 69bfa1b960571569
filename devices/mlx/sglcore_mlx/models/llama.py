"""Llama 1 to 3, and the many models with its layers."""

from __future__ import annotations

from sglcore_mlx.layers.build import Build
from sglcore_mlx.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore_mlx.layers.mlp import GatedMlp


class LlamaForCausalLM(CausalLM):
    """One bias switch for all attention projections, one for the feed-forward block."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        config = build.config
        attention = SelfAttention(
            build.at("self_attn"), layer_id, qkv_bias=config.attention_bias, output_bias=config.attention_bias
        )
        mlp = GatedMlp(build.at("mlp"), config.intermediate_size, config.mlp_bias)
        return DecoderLayer(build, attention, mlp)
