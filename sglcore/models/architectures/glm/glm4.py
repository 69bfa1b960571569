"""GLM-4 of 2025: the layers of 2024 with norms also after attention and feed-forward."""

from __future__ import annotations

from sglcore.models.architectures.glm.glm import GlmForCausalLM
from sglcore.models.decoder import SandwichLayer
from sglcore.models.layer_kinds import Build

NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4 of 2024 with four norms in each layer (`SandwichLayer`)."""

    def make_layer(self, build: Build, layer_id: int) -> SandwichLayer:
        mlp = build.mlp("mlp", build.config.intermediate_size, fused="gate_up_proj")
        return SandwichLayer(build, self.make_attention(build, layer_id), mlp, NORMS)
