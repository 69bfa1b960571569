"""DeepSeek-V3, V3.2 (with an indexer), and GLM's models with the same parts.

They have latent attention, sigmoid routing with a bias, and a shared expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from sglcore.checkpoint.latent_config import LatentConfig, with_indexer
from sglcore.checkpoint.moe_spec import RoutingSpec
from sglcore.models.architectures.deepseek.deepseek_v2 import DeepseekV2ForCausalLM
from sglcore.models.layer_kinds import Build, Layer


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V2's layers with sigmoid routing and a bias for each expert. Kimi K2 and
    GLM-4.7-Flash also have this architecture."""

    wanted: ClassVar[Mapping[str, Any]] = MappingProxyType({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})

    def make_experts(self, build: Build) -> Layer:
        return build.experts("mlp", self.moe, routing=RoutingSpec("sigmoid"))


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """A query attends to the tokens that an indexer selects. `is_paired`: the indexer rotates pairs
    of neighbours; False: pairs that are half of the rotated elements apart."""

    is_paired: ClassVar[bool] = False

    def make_latent(self, build: Build) -> LatentConfig:
        return with_indexer(build.config, super().make_latent(build), self.is_paired)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5: some layers reuse the tokens that the indexer of an earlier layer selected."""

    is_paired: ClassVar[bool] = True
