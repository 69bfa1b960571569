"""Layers of transformers' classes that choose experts are never rounded, wherever in the router
they are; and a router whose weight or logits something reads stays the class's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sglcore.models.transformers_backend.host_routed_experts import take_routed
from sglcore.models.transformers_backend.kernel_layers import PackedLinear
from sglcore.models.transformers_backend.kernel_replacement import replace
from sglcore.models.transformers_backend.moe_adapter import serve_experts
from sglcore.models.transformers_backend.router_detection import Router
from sglcore.models.transformers_backend.stateful_layers import find_mixers
from tests.models.transformers.test_transformers_models import empty
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


class Routes(nn.Module):
    """Stands for a block with experts: scales their weights by something of its router's."""

    def __init__(self, own: Any, scale: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.gate, self.experts, self.scale = own.gate, own.experts, scale

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [1, T, 64]."""
        logits, weights, experts = self.gate(hidden[0])
        return self.experts(hidden[0], experts, weights * self.scale(self.gate, logits))[None]


@pytest.mark.parametrize(
    ("scale", "is_replaced"),
    [
        (lambda gate, logits: 2, True),
        (lambda gate, logits: gate.weight.norm(), False),
        (lambda gate, logits: logits.amax(), False),
    ],
    ids=["neither", "its weight", "its logits"],
)
def test_a_router_is_replaced_if_its_choice_alone_is_read(
    scale: Callable[[Any, Tensor], Any], is_replaced: bool
) -> None:
    model: Any = empty("mixtral").eval()
    serve_experts(model)
    model.model.layers[1].mlp = Routes(model.model.layers[1].mlp, scale)
    found = replace(model, lambda name: False)
    assert [type(layer.mlp.gate) is Router for layer in model.model.layers] == [True, is_replaced, True]
    assert len(found.routers) == 2 + is_replaced
