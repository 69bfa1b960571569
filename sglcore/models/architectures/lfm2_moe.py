"""LFM2 MoE: sigmoid routing with a bias, after some dense layers."""

from __future__ import annotations

from typing import ClassVar

from sglcore.checkpoint.moe_spec import RoutingSpec
from sglcore.models.architectures.lfm2 import Lfm2ForCausalLM
from sglcore.models.layer_kinds import Build, Layer


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with routed experts and no shared expert."""

    knows: ClassVar[frozenset[str]] = frozenset({"routed_scaling_factor"})

    def make_mlp(self, build: Build, layer_id: int) -> Layer:
        """Return the feed-forward block of one layer: dense, or experts."""
        if not self.moe.layers[layer_id]:
            return super().make_mlp(build, layer_id)
        return build.experts("mlp", self.moe, routing=RoutingSpec("sigmoid"))
