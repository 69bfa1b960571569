"""Qwen 1.5 and 2 MoE: Qwen 2's attention, routed experts, and a gated shared expert."""

from __future__ import annotations

from typing import ClassVar

from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention, SharedExpert
from sglcore.models.layer_kinds import Build, Layer


class Qwen2MoeForCausalLM(CausalLM):
    """Routed experts, or a dense block in the layers that the configuration marks."""

    knows: ClassVar[frozenset[str]] = frozenset({"shared_expert_intermediate_size"})

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        bias = build.config.attention_bias
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary, qkv_bias=bias)
        return DecoderLayer(build, attention, self.make_mlp(build, layer_id))

    def make_mlp(self, build: Build, layer_id: int) -> Layer:
        """Return the feed-forward block of one layer: dense, or routed experts plus a gated shared
        expert.
        """
        if not self.moe.layers[layer_id]:
            return build.mlp("mlp", build.config.intermediate_size)
        block = build.at("mlp")
        shared = block.mlp("shared_expert", self.moe.shared_size)
        return SharedExpert(block, build.experts("mlp", self.moe), shared, "shared_expert_gate")
