"""gpt-oss: sliding window in every second layer, attention sinks, experts with biases and clamp."""

from __future__ import annotations

from typing import ClassVar

from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.models.layer_kinds import Build


class GptOssForCausalLM(CausalLM):
    """Norms multiply in float32. Experts in all layers."""

    knows: ClassVar[frozenset[str]] = frozenset({"swiglu_alpha", "swiglu_limit"})
    norm_offset: ClassVar[float | None] = 0.0

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        words, bias = build.config.words, build.config.attention_bias
        attention = SelfAttention(
            build.at("self_attn"), layer_id, self.rotary, qkv_bias=bias, output_bias=bias, sinks=True
        )
        spec = ExpertSpec("clamped", alpha=words["swiglu_alpha"], limit=words["swiglu_limit"])
        experts = build.experts("mlp", self.moe, spec, RoutingSpec(gate="router", bias=True))
        return DecoderLayer(build, attention, experts, self.norm_offset)
