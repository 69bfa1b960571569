"""GLM-4 of 2024: Llama's layers; half of each head is rotated, in pairs of neighbours."""

from __future__ import annotations

from sglcore.models.decoder import AnyLayer, CausalLM, DecoderLayer, SelfAttention
from sglcore.models.layer_kinds import Build


class GlmForCausalLM(CausalLM):
    """`attention_bias` of the configuration adds biases to queries, keys and values only; gate and
    up are stored in one weight."""

    def make_layer(self, build: Build, layer_id: int) -> AnyLayer:
        return DecoderLayer(
            build,
            self.make_attention(build, layer_id),
            build.mlp("mlp", build.config.intermediate_size, fused="gate_up_proj"),
        )

    def make_attention(self, build: Build, layer_id: int) -> SelfAttention:
        """Return the attention of one layer."""
        bias = build.config.attention_bias
        return SelfAttention(build.at("self_attn"), layer_id, self.rotary, qkv_bias=bias, is_interleaved=True)
