"""Phi 3 and 4: Llama's layers; projections with a common input are stored in one weight, and a part
of each head is rotated."""

from __future__ import annotations

from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.models.layer_kinds import Build


class Phi3ForCausalLM(CausalLM):
    """No biases anywhere."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary, fused="qkv_proj")
        return DecoderLayer(build, attention, build.mlp("mlp", build.config.intermediate_size, fused="gate_up_proj"))
