"""Latent attention in the published file formats, and configurations that it refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sglcore.checkpoint.latent_config import latent_config, with_indexer
from sglcore.checkpoint.model_config import read_config
from sglcore.core.errors import ConfigError
from sglcore.runtime.memory.geometry import rows_row
from sglcore.step.sizing import Geometry, size_text
from tests.checkpoints import CAUSAL, oracle_logprobs, save
from tests.latent import LATENT, SIZES, deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe_lite, glm_moe_dsa, publish
from tests.models.steps import Steps, load

IDS = random.Random(3).choices(range(97), k=60)


@pytest.mark.parametrize("make", [deepseek_v3, deepseek_v32])
def test_published_files_mean_what_transformers_reads_in_them(make: Callable[..., Any], tmp_path: Path) -> None:
    oracle = publish(make(), tmp_path)
    got = Steps(load(tmp_path, max_positions=128)).logprobs({1: IDS})
    assert (got - oracle_logprobs(oracle, IDS)).abs().max() < 5e-5


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "deepseek-v3.2", "glm4-moe"])
def test_groups_of_experts_bind_the_oracles(name: str) -> None:
    """If its expert groups changed nothing, an oracle would test no group rule."""
    oracle = {**CAUSAL, **LATENT}[name]()
    grouped = oracle_logprobs(oracle, IDS)
    for module in oracle.modules():
        for own in (vars(module), vars(getattr(module, "config", None) or oracle)):
            own |= {word: 1 for word in ("n_group", "num_group", "topk_group") if word in own}
    assert (oracle_logprobs(oracle, IDS) - grouped).abs().max() > 1e-2


def test_without_a_method_deepseek_v2_has_no_groups(tmp_path: Path) -> None:
    """Transformers too reads a file with groups but without a method of choosing experts as having
    no groups."""
    raw = json.loads((save(deepseek_v2(), tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "topk_method": None}))
    moe = read_config(tmp_path).moe
    del raw["topk_method"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert transformers.AutoConfig.from_pretrained(tmp_path).topk_method == "greedy"
    assert moe == read_config(tmp_path).moe
    assert moe is not None and (moe.num_groups, moe.top_groups, raw["n_group"]) == (1, 1, 4)


@pytest.mark.parametrize("make", [deepseek_v2, deepseek_v32])
def test_in_bfloat16_what_is_chosen_is_scored_in_float32(make: Callable[..., Any], tmp_path: Path) -> None:
    """Rounding may change some choices and put those tokens far off, so the mean is compared."""
    oracle = make()
    model = load(save(oracle, tmp_path), dtype=torch.bfloat16)
    scored = [model.layers[1].mlp.experts._route.weight]
    scored += [layer.indexer.weights_proj for layer in model.attention_layers if layer.indexer is not None]
    assert {each.dtype for each in scored} == {torch.float32}
    assert (Steps(model).logprobs({1: IDS}) - oracle_logprobs(oracle, IDS)).abs().mean() < 0.3


def test_keys_and_values_are_made_by_views_of_one_weight(tmp_path: Path) -> None:
    model = load(save(deepseek_v3(), tmp_path))
    for layer in model.attention_layers:
        both = layer.to_keys.untyped_storage()
        assert both.data_ptr() == layer.to_values.untyped_storage().data_ptr()
        heads = SIZES["qk_nope_head_dim"] + SIZES["v_head_dim"]
        assert both.nbytes() == 4 * SIZES["num_attention_heads"] * heads * SIZES["kv_lora_rank"]


def test_the_ledger_has_rows_beside_the_keys_and_values_that_heads_make_of_them(tmp_path: Path) -> None:
    layers = load(save(deepseek_v3(), tmp_path)).attention_layers
    head = SIZES["qk_nope_head_dim"] + SIZES["qk_rope_head_dim"] + SIZES["v_head_dim"]
    dense = size_text(1000 * 3 * SIZES["num_attention_heads"] * head * 4)
    row = rows_row(Geometry(16 * 1024), layers, 16, torch.float32)
    assert row.effective == f"{size_text(1000 * 1024)} for 1,000 tokens" and f"by head would be {dense}" in row.reason


@pytest.mark.parametrize(
    ("make", "changes", "text"),
    [
        (deepseek_v3, {"rope_interleave": False}, "rope_interleave = False; wanted True"),
        (deepseek_v3, {"scoring_func": "softmax"}, "scoring_func = 'softmax'; wanted 'sigmoid'"),
        (deepseek_v3, {"moe_layer_freq": 2}, "moe_layer_freq = 2; wanted 1"),
        (deepseek_v3, {"n_group": 3}, "from 1 of 3 groups of 8 experts; wanted no more than exist"),
        (deepseek_v3, {"kv_lora_rank": 0}, "kv_lora_rank = 0; wanted a whole number above zero"),
        (deepseek_v3, {"qk_rope_head_dim": 15}, "rotates 15 elements of a head; wanted an even number"),
        (
            deepseek_v3,
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8},
            "sliding_window = 8; wanted none with latent attention",
        ),
        (glm4_moe_lite, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5; wanted 1: all of"),
        (deepseek_v2, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'; wanted 'greedy' or"),
        (deepseek_v2, {"norm_topk_prob": True}, "norm_topk_prob = True; wanted False"),
        (deepseek_v32, {"index_head_dim": 8}, "index_head_dim = 8; wanted qk_rope_head_dim, 16, at least"),
        (deepseek_v32, {"q_lora_rank": None}, "q_lora_rank = None; wanted a rank"),
        (deepseek_v32, {"mlp_layer_types": ["dense"]}, "has 1 mlp_layer_types; wanted 3, one for each layer"),
        (deepseek_v32, {"layer_types": ["other_attention"] * 3}, "has layers of 'other_attention'"),
        (glm_moe_dsa, {"indexer_types": ["shared", "full", "full"]}, "indexer_types = ['shared', 'full', 'full']"),
    ],
)
def test_what_does_not_fit_is_one_line_before_weights_are_read(
    make: Callable[..., Any], changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    architecture = type(make()).__name__
    config = {**make().config.to_dict(), "architectures": [architecture], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as raised:
        load(tmp_path)
    assert text in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ({}, "FFFFF"),
        ({"index_topk_freq": 2}, "FFSFS"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSFS"),
        ({"index_topk_pattern": "FSFSS"}, "FSFSS"),
    ],
)
def test_layers_that_share_a_choice_are_those_of_transformers(
    words: dict[str, Any], kinds: str, tmp_path: Path
) -> None:
    wanted = transformers.GlmMoeDsaConfig(**{**SIZES, "num_hidden_layers": 5}, **words)
    config = {**wanted.to_dict(), "architectures": ["GlmMoeDsaForCausalLM"], "indexer_types": None, **words}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    latent = with_indexer(found, latent_config(found, {}), is_paired=True)
    assert list(latent.indexers) == wanted.indexer_types
    assert "".join(each[0].upper() for each in latent.indexers) == kinds


@pytest.mark.parametrize("size", [16, 18])
def test_an_indexer_head_may_be_rotated_whole(size: int, tmp_path: Path) -> None:
    config = {**deepseek_v32().config.to_dict(), "architectures": ["DeepseekV32ForCausalLM"], "index_head_dim": size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    latent = with_indexer(found, latent_config(found, {}), is_paired=False)
    assert (latent.index_dim, latent.rope_dim, latent.is_paired) == (size, 16, False)
