"""Qwen 3, dense: each query and key head is normalised before the rotary embedding."""

from __future__ import annotations

from torch import Tensor

from sglcore.layers.build import Build
from sglcore.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.layers.mlp import GatedMlp


def qwen3_attention(build: Build, layer_id: int, cos_sin: Tensor) -> SelfAttention:
    """The attention block of the dense and the sparse model."""
    bias = build.config.attention_bias
    return SelfAttention(build.at("self_attn"), layer_id, cos_sin, qkv_bias=bias, output_bias=bias, qk_norm=True)


class Qwen3ForCausalLM(CausalLM):
    """Dense feed-forward blocks without biases."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        mlp = GatedMlp(build.at("mlp"), build.config.intermediate_size)
        return DecoderLayer(build, qwen3_attention(build, layer_id, self.cos_sin), mlp)
