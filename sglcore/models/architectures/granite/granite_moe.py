"""Granite 3 MoE: the dense model with experts in every layer."""

from __future__ import annotations

from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.models.architectures.granite.granite import GraniteForCausalLM
from sglcore.models.layer_kinds import Build, Layer


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite 3 with routed experts; one weight has gate and up of all experts of a layer, another
    has down."""

    def make_mlp(self, build: Build) -> Layer:
        spec, routing = ExpertSpec(parts=("input_linear", "output_linear")), RoutingSpec(gate="router.layer")
        return build.experts("block_sparse_moe", self.moe, spec, routing)
