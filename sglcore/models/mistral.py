"""Mistral: Llama's layers without biases, with a sliding window in every layer (the configuration has the windows)."""

from __future__ import annotations

from sglcore.layers.build import Build
from sglcore.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.layers.mlp import GatedMlp


class MistralForCausalLM(CausalLM):
    """No biases anywhere."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        attention = SelfAttention(build.at("self_attn"), layer_id, self.cos_sin)
        mlp = GatedMlp(build.at("mlp"), build.config.intermediate_size)
        return DecoderLayer(build, attention, mlp)
