"""Qwen 3, sparse: the dense model's attention, with experts in the layers that the configuration marks."""

from __future__ import annotations

from sglcore.device.errors import ConfigError
from sglcore.layers.build import Build
from sglcore.layers.decoder import CausalLM, DecoderLayer
from sglcore.layers.mlp import GatedMlp
from sglcore.layers.moe import SparseMoe
from sglcore.models.qwen3 import qwen3_attention


class Qwen3MoeForCausalLM(CausalLM):
    """Experts, or a dense block where the configuration says so."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        config = build.config
        if config.moe is None:
            raise ConfigError(
                f"{config.path / 'config.json'} has no num_experts and moe_intermediate_size", wanted="both"
            )
        if config.moe.layers[layer_id]:
            mlp = SparseMoe(build.at("mlp"), config.moe)
        else:
            mlp = GatedMlp(build.at("mlp"), config.intermediate_size)
        return DecoderLayer(build, qwen3_attention(build, layer_id, self.cos_sin), mlp)
