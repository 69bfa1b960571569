"""GLM-4.5 and 4.6: dense layers, then MoE layers with sigmoid routing, a bias and a shared
expert."""

from __future__ import annotations

from typing import ClassVar

from sglcore.checkpoint.moe_spec import RoutingSpec
from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention, SharedExpert
from sglcore.models.layer_kinds import Build, Layer


class Glm4MoeForCausalLM(CausalLM):
    """`attention_bias` of the configuration adds biases to queries, keys and values only,
    `use_qk_norm` a norm for each query and key head; half of each head is rotated."""

    knows: ClassVar[frozenset[str]] = frozenset({"n_group", "n_shared_experts", "routed_scaling_factor", "use_qk_norm"})
    behind: ClassVar[int] = 1

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        config = build.config
        attention = SelfAttention(
            build.at("self_attn"),
            layer_id,
            self.rotary,
            qkv_bias=config.attention_bias,
            qk_norm=config.options.get("use_qk_norm", False),
        )
        return DecoderLayer(build, attention, self._make_mlp(build, layer_id))

    def _make_mlp(self, build: Build, layer_id: int) -> Layer:
        if not self.moe.layers[layer_id]:
            return build.mlp("mlp", build.config.intermediate_size)
        block, experts = build.at("mlp"), build.experts("mlp", self.moe, routing=RoutingSpec("sigmoid"))
        return SharedExpert(block, experts, block.mlp("shared_experts", self.moe.shared_size))
