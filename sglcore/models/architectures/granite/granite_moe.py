"""Granite 3 MoE: the dense model with experts in every layer."""

from __future__ import annotations

from sglcore.models.architectures.granite.granite import GraniteForCausalLM
from sglcore.models.layer_kinds import Build, Layer


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """A layer's experts are stored in one weight."""

    def make_mlp(self, build: Build) -> Layer:
        return build.experts("block_sparse_moe", self.moe, gate="router.layer", parts=("input_linear", "output_linear"))
