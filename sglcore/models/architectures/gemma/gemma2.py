"""Gemma 2: four norms in each layer, a sliding window in every second layer, soft caps on scores
and logits."""

from __future__ import annotations

from typing import ClassVar

from sglcore.models.architectures.gemma.gemma import GemmaForCausalLM
from sglcore.models.decoder import SandwichLayer, SelfAttention
from sglcore.models.layer_kinds import Build

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Layers are `SandwichLayer`s. The scale of scores comes from the configuration's
    `query_pre_attn_scalar`."""

    calls_library = True
    knows: ClassVar[frozenset[str]] = frozenset(
        {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
    )
    qk_norm: ClassVar[bool] = False

    def make_layer(self, build: Build, layer_id: int) -> SandwichLayer:
        config, bias = build.config, build.config.attention_bias
        attention = SelfAttention(
            build.at("self_attn"),
            layer_id,
            self.rotary_of(layer_id),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=self.qk_norm,
            norm_offset=self.norm_offset,
        )
        return SandwichLayer(build, attention, build.mlp("mlp", config.intermediate_size), NORMS, self.norm_offset)
