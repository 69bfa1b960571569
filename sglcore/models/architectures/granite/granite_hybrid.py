"""Granite 4: Granite 3's multipliers around layers of Mamba 2, and attention in some layers.

The feed-forward is a shared expert, with or without routed experts.
"""

from __future__ import annotations

from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.checkpoint.recurrent_config import FULL, layer_kinds
from sglcore.models.architectures.granite.granite import GraniteForCausalLM, GraniteLayer
from sglcore.models.decoder import Mixer, SelfAttention, SharedExpert, make_mamba2
from sglcore.models.layer_kinds import Build, Layer


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Attention has a rotary embedding if the configuration says so, else no positions."""

    @classmethod
    def own_name(cls, name: str) -> str:
        """Return the model's name of a tensor: the shared expert is `shared_mlp` (some checkpoints
        without routed experts call it `mlp`), its `output_linear` is `down_proj`.
        """
        name = super().own_name(name).replace(".mlp.", ".shared_mlp.")
        return name.replace(".shared_mlp.output_linear.", ".shared_mlp.down_proj.")

    def make_layer(self, build: Build, layer_id: int) -> GraniteLayer:
        kinds = layer_kinds(build.config)
        of_its_kind = kinds[:layer_id].count(kinds[layer_id])
        mixer: Mixer
        if kinds[layer_id] == FULL:
            rotary = self.rotary if build.config.raw.get("position_embedding_type") == "rope" else None
            bias = build.config.attention_bias
            mixer = SelfAttention(build.at("self_attn"), of_its_kind, rotary, qkv_bias=bias, output_bias=bias)
        else:
            mixer = make_mamba2(build.at("mamba"), of_its_kind)
        return GraniteLayer(build, mixer, self.make_mlp(build))

    def make_mlp(self, build: Build) -> Layer:
        shared = build.mlp("shared_mlp", build.config.words.get("shared_intermediate_size", 1024), fused="input_linear")
        if build.config.moe is None:
            return shared
        spec, routing = ExpertSpec(parts=("input_linear", "output_linear")), RoutingSpec(gate="router.layer")
        experts = build.experts("block_sparse_moe", self.moe, spec, routing)
        return SharedExpert(build, experts, shared)
