"""Qwen 2 and 2.5, and MiMo: Llama's layers with biases on the query, key and value projections
only."""

from __future__ import annotations

from sglcore.models.decoder import CausalLM, DecoderLayer, SelfAttention
from sglcore.models.layer_kinds import Build


class Qwen2ForCausalLM(CausalLM):
    """Queries, keys and values always have biases; the configuration has no switch for them."""

    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        attention = SelfAttention(build.at("self_attn"), layer_id, self.rotary, qkv_bias=True)
        return DecoderLayer(build, attention, build.mlp("mlp", build.config.intermediate_size))


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen 2's layers. The checkpoint's MTP layers are not read."""

    ignored = (r"model\.mtp_layers\..*",)
