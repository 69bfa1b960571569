"""Both forms of DeepSeek-V4's configuration, and errors for inconsistent ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression, compressed_config
from sglcore.checkpoint.model_config import read_config
from sglcore.core.errors import ConfigError

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SAVED: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "o_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_head_dim": 16,
    "sliding_window": 16,
    "max_position_embeddings": 4096,
    "layer_types": [SLIDING, HEAVY, SPARSE, HEAVY],
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 20000.0, "partial_rotary_factor": 0.25},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 80000.0,
            "partial_rotary_factor": 0.25,
            "factor": 16,
            "original_max_position_embeddings": 256,
            "attention_factor": 1.0,
        },
    },
}
LEFT = (
    "layer_types",
    "compress_rates",
    "mlp_layer_types",
    "rope_parameters",
    "sliding_window",
    "partial_rotary_factor",
)
PUBLISHED: dict[str, Any] = {
    **{name: value for name, value in SAVED.items() if name not in LEFT},
    "compress_ratios": [0, 128, 4, 128, 1],
    "n_hash_layers": 1,
    "window_size": 16,
    "qk_rope_head_dim": 8,
    "rope_theta": 20000.0,
    "compress_rope_theta": 80000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256},
}


def read(folder: Path, given: dict[str, Any]) -> CompressedConfig:
    """Read a checkpoint with this configuration; a value of None removes the key."""
    kept = {name: value for name, value in given.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return compressed_config(read_config(folder))


def test_both_forms_say_the_same(tmp_path: Path) -> None:
    saved = read(tmp_path, SAVED)
    assert saved == read(tmp_path, PUBLISHED)
    assert saved.compressions == (None, Compression(128, False), Compression(4, True), Compression(128, False))
    assert (saved.window, saved.rope_dim, saved.is_hashed) == (16, 8, (True, False, False, False))
    assert (saved.main_rope.theta, saved.block_rope.theta) == (20000, 80000)
    assert [each.span for each in saved.compressions if each] == [128, 8, 128]


def test_words_of_older_files_change_the_ratios(tmp_path: Path) -> None:
    found = read(tmp_path, {**PUBLISHED, "compress_rate_hca": 16})
    assert [each and each.ratio for each in found.compressions] == [None, 16, 4, 16]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**PUBLISHED, "n_hash_layers": None}, "has neither num_hash_layers nor mlp_layer_types; wanted how many"),
        ({**PUBLISHED, "compress_ratios": None}, "has neither layer_types nor compress_ratios; wanted one of them"),
        ({**PUBLISHED, "compress_ratios": [0, 8, 4, 128]}, "compress_ratios = 8 for layer 1; wanted one of 0, 4, 128"),
        ({**PUBLISHED, "compress_ratios": [0, 4]}, "has 2 compress_ratios; wanted 4, one for each layer"),
        ({**SAVED, "layer_types": [SLIDING, "attention", SPARSE, HEAVY]}, "layer_types = 'attention' for layer 1"),
        ({**SAVED, "mlp_layer_types": ["dense", *["moe"] * 3]}, "mlp_layer_types = 'dense' for layer 0"),
        ({**SAVED, "compress_rates": {SPARSE: 0}}, f"compress_rates of {SPARSE} = 0; wanted a whole number"),
        ({**SAVED, "compress_rates": {"other": 4}}, "compress_rates of other = 4"),
        ({**SAVED, "index_head_dim": 4}, "index_head_dim = 4; wanted at least the rotated 8"),
        ({**SAVED, "o_groups": 3}, "o_groups = 3; wanted a divisor of 4 heads of 32"),
        ({**SAVED, "n_shared_experts": 2}, "n_shared_experts = 2; wanted 1"),
        ({**SAVED, "attention_bias": True}, "attention_bias = True; wanted False"),
        ({**SAVED, "mlp_bias": True}, "mlp_bias = True; wanted False"),
        ({**PUBLISHED, "qk_rope_head_dim": 34}, "qk_rope_head_dim = 34; wanted 1 to head_dim, 32"),
        ({**PUBLISHED, "qk_rope_head_dim": 0}, "qk_rope_head_dim = 0; wanted 1 to head_dim, 32"),
        ({**SAVED, "num_key_value_heads": 2}, "num_key_value_heads = 2; wanted 1"),
        ({**SAVED, "scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'; wanted 'sqrtsoftplus'"),
        ({**SAVED, "hc_mult": 0}, "hc_mult = 0; wanted a whole number above zero"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        read(tmp_path, given)
    assert "\n" not in str(raised.value) and str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    "given",
    [
        {**SAVED, "index_head_dim": 8},
        {**PUBLISHED, "qk_rope_head_dim": 32, "index_head_dim": 32},
        {**PUBLISHED, "compress_rate_csa": 1},
        {**SAVED, "o_groups": 128},
    ],
    ids=["an indexer that rotates all", "heads that rotate all", "blocks of one token", "groups of one element"],
)
def test_the_last_values_that_fit_are_taken(tmp_path: Path, given: dict[str, Any]) -> None:
    found = read(tmp_path, given)
    assert found.heads * found.head_dim % found.groups == 0
    assert found.rope_dim <= min(found.index_dim, found.head_dim)


def test_the_layer_that_predicts_one_more_token_has_a_window_and_learned_experts(tmp_path: Path) -> None:
    whole = read(tmp_path, {**SAVED, "mlp_layer_types": ["hash_moe"] * 4})
    found = whole.of_next_token
    assert (found.compressions, found.is_hashed) == ((None,), (False,))
    assert (found.window, found.main_rope) == (whole.window, whole.main_rope)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
def test_the_first_layers_choose_experts_by_a_tokens_id(tmp_path: Path, count: int) -> None:
    found = read(tmp_path, {**PUBLISHED, "n_hash_layers": count})
    assert found.is_hashed == tuple(layer < count for layer in range(4))
    kinds = ["hash_moe" if layer < count else "moe" for layer in range(4)]
    assert read(tmp_path, {**SAVED, "mlp_layer_types": kinds}).is_hashed == found.is_hashed


def test_layers_of_the_saved_form_count_if_a_file_has_both(tmp_path: Path) -> None:
    both = {**SAVED, "compress_ratios": [0, 0, 0, 0], "num_hash_layers": 4}
    assert read(tmp_path, both) == read(tmp_path, SAVED)


@pytest.mark.parametrize(("word", "kind"), [("csa", SPARSE), ("hca", HEAVY)])
def test_a_rate_of_its_own_word_counts_before_the_list(tmp_path: Path, word: str, kind: str) -> None:
    found = read(tmp_path, {**SAVED, f"compress_rate_{word}": 6})
    usual = {SPARSE: 4, HEAVY: 128, kind: 6}
    wanted = [usual.get(each) for each in SAVED["layer_types"]]
    assert [each and each.ratio for each in found.compressions] == wanted


@pytest.mark.parametrize("kind", [SPARSE, HEAVY])
def test_a_kind_of_layers_without_a_rate_has_the_usual_one(tmp_path: Path, kind: str) -> None:
    usual = {SPARSE: 4, HEAVY: 128}
    for rates in ({kind: 6}, {}, None):
        found = read(tmp_path, {**SAVED, "compress_rates": rates})
        wanted = [{**usual, **(rates or {})}.get(each) for each in SAVED["layer_types"]]
        assert [each and each.ratio for each in found.compressions] == wanted


@pytest.mark.parametrize("rate", [True, 2.0, "4", -1])
def test_a_rate_that_is_no_count_is_refused(tmp_path: Path, rate: Any) -> None:
    with pytest.raises(ConfigError, match=rf"compress_rates of {HEAVY} = {rate!r}; wanted a whole number above zero"):
        read(tmp_path, {**SAVED, "compress_rates": {SPARSE: 4, HEAVY: rate}})


def test_blocks_are_rotated_without_a_factor_of_cosines(tmp_path: Path) -> None:
    ropes = {**SAVED["rope_parameters"]}
    ropes["compress"] = {**ropes["compress"], "attention_factor": 2.0}
    assert read(tmp_path, {**SAVED, "rope_parameters": ropes}).block_rope.scaling["attention_factor"] == 1.0


def test_blocks_rotate_the_part_that_the_file_says_for_all(tmp_path: Path) -> None:
    for given in (SAVED, PUBLISHED):
        found = read(tmp_path, given)
        assert (found.block_rope.partial, found.main_rope.partial) == (0.25, 0.25)
    ropes = {
        name: {word: value for word, value in each.items() if word != "partial_rotary_factor"}
        for name, each in SAVED["rope_parameters"].items()
    }
    found = read(tmp_path, {**SAVED, "rope_parameters": ropes})
    assert (found.block_rope.partial, found.main_rope.partial) == (0.25, 0.25)


def test_every_size_is_read_from_its_own_word(tmp_path: Path) -> None:
    own = {"q_lora_rank": 24, "o_lora_rank": 12, "index_n_heads": 3, "index_topk": 7, "index_head_dim": 20}
    own |= {"hc_mult": 2, "hc_sinkhorn_iters": 5, "hc_eps": 0.5, "swiglu_limit": 3.0, "sliding_window": 9}
    found = read(tmp_path, {**SAVED, **own})
    ranks = {"q_lora_rank": found.q_lora_rank, "o_lora_rank": found.o_lora_rank}
    indexer = {"index_n_heads": found.index_heads, "index_topk": found.index_topk, "index_head_dim": found.index_dim}
    streams = {"hc_mult": found.streams, "hc_sinkhorn_iters": found.sinkhorn_iters, "hc_eps": found.hc_eps}
    assert {**ranks, **indexer, **streams, "swiglu_limit": found.limit, "sliding_window": found.window} == own
