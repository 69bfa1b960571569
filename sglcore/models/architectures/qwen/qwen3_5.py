"""Qwen 3.5, dense and MoE: Qwen3-Next's layers with separate projections for the delta rule.

The vision part is not read.
"""

from __future__ import annotations

from sglcore.checkpoint.recurrent_config import DeltaNetConfig
from sglcore.models.architectures.qwen.qwen3_next import Qwen3NextForCausalLM
from sglcore.models.architectures.qwen.qwen_vl import LanguagePart
from sglcore.models.layer_kinds import Build, Layer


class Qwen35ForCausalLM(LanguagePart, Qwen3NextForCausalLM):
    """Qwen3-Next's layers, from separate weights for each part of the delta rule's projection. The
    checkpoint's vision part and MTP layers are not read."""

    ignored = (*LanguagePart.ignored, *Qwen3NextForCausalLM.ignored)

    def make_projection(self, build: Build, net: DeltaNetConfig) -> Layer:
        """Return Qwen3-Next's projection, from separate weights."""
        gates = (("in_proj_z", net.values), ("in_proj_b", net.value_heads), ("in_proj_a", net.value_heads))
        return build.fused((("in_proj_qkv", 2 * net.keys + net.values), *gates), build.config.hidden_size)
