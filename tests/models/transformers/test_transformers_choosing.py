"""Layers of transformers' classes that choose experts are never rounded, wherever in the router
they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sglcore.models.transformers_backend.host_routed_experts import take_routed
from sglcore.models.transformers_backend.kernel_layers import PackedLinear
from sglcore.models.transformers_backend.kernel_replacement import replace
from sglcore.models.transformers_backend.moe_adapter import serve_experts
from sglcore.models.transformers_backend.stateful_layers import find_mixers
from tests.models.transformers_cases import sizes_of

EXPERTS = 11
"""A number of experts that is no other width in a tiny model."""
COUNTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS)
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": EXPERTS, "moe_top_k": 2}},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
    "longcat_flash": {"zero_expert_num": 0},
}
KINDS = ("afmoe", "dbrx", "gemma4_text", "hunyuan_v1_moe", "jetmoe", "longcat_flash", "mixtral", "zaya")


@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_that_chooses_experts_is_packed(kind: str) -> None:
    with torch.device("meta"), no_init_weights():
        sizes = {**sizes_of(kind), **COUNTS, **OWN.get(kind, {})}
        model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes)).eval()
    serve_experts(model)
    take_routed(model)
    chosen = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and may_choose(each)]
    found = replace(model, lambda name: False, find_mixers(model))
    packed = {layer.name for layer in found.layers if isinstance(layer, PackedLinear)}
    assert chosen or found.routers, "what chooses is not found"
    assert packed.isdisjoint(chosen) and packed


def may_choose(layer: nn.Linear) -> bool:
    return layer.out_features in (EXPERTS, EXPERTS + 1)
