"""The parts of DeepSeek-V4 other than attention, against transformers' own, in float32."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.checkpoint.compressed_config import compressed_config
from sglcore.checkpoint.model_config import ModelConfig, read_config
from sglcore.layers.build_scope import Weights
from sglcore.layers.torch_layers import Build
from sglcore.models.architectures.deepseek.deepseek_v4 import LimitedExperts
from sglcore.runtime.kernels.table import KernelTable
from tests.checkpoints import Oracle
from tests.deepseek_v4 import deepseek_v4, with_module_names

TOLERANCE = 5e-5
TOKENS = 11


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, ModelConfig]:
    """An oracle that often reaches its activation limit and has distinct values for its constants;
    and its checkpoint's configuration."""
    oracle = deepseek_v4(swiglu_limit=0.3, hc_sinkhorn_iters=3, hc_eps=0.03, rms_norm_eps=0.2)
    return oracle, read_config(with_module_names(oracle, tmp_path_factory.mktemp("model")))


def made(pair: tuple[Oracle, ModelConfig], make: Callable[[Build], Any]) -> Any:
    """A part of the model with the oracle's weights."""
    oracle, config = pair
    weights, state = Weights(torch.float32, torch.device("cpu")), oracle.state_dict()
    part = make(Build(config, KernelTable(), weights, 600))
    weights.choose_stacks(state)
    with torch.no_grad():
        for name, target in weights.targets.items():
            target.copy_(state[name])
    return part


def rows(*sizes: int) -> Tensor:
    """Random token rows, some with large values."""
    torch.manual_seed(3)
    return torch.randn(TOKENS, *sizes) * torch.linspace(0.2, 5, TOKENS).view(-1, *(1 for _ in sizes))


def near(found: Tensor, wanted: Tensor) -> bool:
    """Whether both have the same shape and agree within the tolerance."""
    return found.shape == wanted.shape and bool((found - wanted).abs().max() < TOLERANCE)


@torch.no_grad()
def test_streams_become_one_and_one_becomes_streams_as_transformers_do(pair) -> None:
    oracle, config = pair
    net = compressed_config(config)
    name = ("attn_hc", net.streams, net.sinkhorn_iters, net.hc_eps)
    part = made(pair, lambda build: build.at("model", "layers", 2).hyper_connection(*name))
    streams, result = rows(4, 64), rows(64)
    post, comb, x = oracle.model.layers[2].attn_hc(streams.unsqueeze(0))
    found, mix = part.narrow(streams)
    wide = post[0].unsqueeze(-1) * result.unsqueeze(1) + comb[0].transpose(1, 2) @ streams
    assert near(found, x[0]) and near(part.widen(result, streams, mix), wide)
    assert not near(part.widen(result, streams, (mix[0], mix[1].transpose(1, 2))), wide), "the direction must show"


@torch.no_grad()
def test_streams_end_as_one_as_transformers_do(pair) -> None:
    oracle, config = pair
    part = made(pair, lambda build: build.at("model").hyper_head("hc_head", 4, compressed_config(config).hc_eps))
    assert near(part.end(rows(4, 64)), oracle.model.hc_head(rows(4, 64).unsqueeze(0))[0])
    assert torch.equal(part.begin(rows(64)), rows(64).unsqueeze(1).expand(TOKENS, 4, 64))


@pytest.mark.parametrize("layer", [0, 2], ids=["hashed", "learned"])
@torch.no_grad()
def test_experts_are_chosen_weighed_and_held_within_the_limit_as_transformers_do(pair, layer: int) -> None:
    oracle, config = pair
    net = compressed_config(config)
    part = made(
        pair,
        lambda build: LimitedExperts(build.at("model", "layers", layer), net, config.moe, net.is_hashed[layer]),
    )
    ids = torch.randint(128, (TOKENS,), generator=torch.Generator().manual_seed(5))
    wanted = oracle.model.layers[layer].mlp(rows(64).unsqueeze(0), input_ids=ids.unsqueeze(0))[0]
    assert near(part(rows(64), SimpleNamespace(input_ids=ids.int())), wanted)


@torch.no_grad()
def test_heads_are_turned_by_the_table_of_their_layer(pair) -> None:
    oracle, config = pair
    net, positions = compressed_config(config), torch.arange(600)
    for kind, rope in (("main", net.main_rope), ("compress", net.block_rope)):
        cos, sin = oracle.model.rotary_emb(torch.zeros(1), positions.unsqueeze(0), layer_type=kind)
        assert near(
            Build(config, KernelTable(), Weights(torch.float32, torch.device("cpu")), 600).rotary(rope),
            torch.cat((cos[0], sin[0]), -1),
        )


@torch.no_grad()
def test_groups_of_heads_are_projected_each_by_itself(pair) -> None:
    part = made(pair, lambda build: build.at("model", "layers", 1, "self_attn").grouped("o_a_proj", 2, 64, 16))
    wanted = pair[0].model.layers[1].self_attn.o_a_proj(rows(128).view(1, TOKENS, 2, 64)).reshape(TOKENS, 32)
    assert near(part(rows(128)), wanted)
