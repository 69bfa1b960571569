"""Mixtral: Mistral's layers with experts in every layer."""

from __future__ import annotations

from sglcore.checkpoint.moe_spec import ExpertSpec
from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.models.layer_kinds import Build


class MixtralForCausalLM(CausalLM):
    """No biases anywhere."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary)
        experts = build.experts("block_sparse_moe", self.moe, ExpertSpec(parts=("w1", "w3", "w2")))
        return DecoderLayer(build, attention, experts)
