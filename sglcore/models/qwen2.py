"""Qwen 2 and 2.5: Llama's layers with biases on the query, key and value projections only."""

from __future__ import annotations

from sglcore.layers.build import Build
from sglcore.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.layers.mlp import GatedMlp


class Qwen2ForCausalLM(CausalLM):
    """The biases are part of the architecture; no switch in the configuration names them."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        attention = SelfAttention(build.at("self_attn"), layer_id, self.cos_sin, qkv_bias=True)
        mlp = GatedMlp(build.at("mlp"), build.config.intermediate_size)
        return DecoderLayer(build, attention, mlp)
