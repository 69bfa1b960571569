"""Mistral: Llama's layers without biases, with sliding windows as the configuration gives them."""

from __future__ import annotations

from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.models.layer_kinds import Build


class MistralForCausalLM(CausalLM):
    """No biases anywhere."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary)
        return DecoderLayer(build, attention, build.mlp("mlp", build.config.intermediate_size))
