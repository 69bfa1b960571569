"""Qwen 3 MoE: the dense model with experts in the layers that the configuration marks."""

from __future__ import annotations

from sglcore.models.architectures.qwen.qwen3 import Qwen3ForCausalLM
from sglcore.models.layer_kinds import Build, Layer


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Routed experts, or a dense block in the layers that the configuration marks."""

    def make_mlp(self, build: Build, layer_id: int) -> Layer:
        return build.experts("mlp", self.moe) if self.moe.layers[layer_id] else super().make_mlp(build, layer_id)
