"""Words that single architectures have for what others call by common names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from sglcore.checkpoint.compressed_config import compressed_config
from sglcore.checkpoint.config_synonyms import WORDS
from sglcore.checkpoint.model_config import ModelConfig, config_of
from sglcore.checkpoint.recurrent_config import FULL, LINEAR, MLP, MOE, Mamba2Config, layer_kinds, mamba2_config
from sglcore.core.errors import ConfigError

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
KINDS = [LINEAR, MLP, FULL, MOE]


def read(architecture: str, **changes: Any) -> ModelConfig:
    """Read a configuration; only its path is not there."""
    return config_of(Path("nowhere"), {**SIZES, "architectures": [architecture], **changes})


def test_numbers_of_nemotron_h_are_those_under_its_own_words() -> None:
    oracle: Any = transformers.NemotronHConfig(
        layers_block_type=["mamba", "mlp", "attention", "moe"],
        mamba_num_heads=6,
        mamba_head_dim=5,
        n_groups=3,
        ssm_state_size=7,
        conv_kernel=3,
        use_conv_bias=False,
        use_bias=True,
        time_step_limit=(0.25, 0.5),
        layer_norm_epsilon=1e-3,
        mlp_hidden_act="silu",
        moe_shared_expert_intermediate_size=40,
        moe_intermediate_size=24,
    )
    given = {name: value for name, value in oracle.to_dict().items() if name not in {*SIZES, "architectures"}}
    found = read("NemotronHForCausalLM", **{**given, "time_step_limit": [0.25, 0.5]})
    assert mamba2_config(found) == Mamba2Config(6, 5, 3, 7, 3, False, True, 0.25, 0.5)
    assert (found.rms_norm_eps, found.hidden_act) == (1e-3, "silu")
    assert found.moe is not None and (found.moe.intermediate_size, found.moe.shared_size) == (24, 40)
    assert layer_kinds(found, KINDS) == tuple(KINDS)


def test_layers_of_nemotron_h_are_those_of_its_newer_word() -> None:
    given = {"layers_block_type": ["mamba", "attention"], "hybrid_override_pattern": "M-*E"}
    found = read("NemotronHForCausalLM", **given)
    assert (found.num_hidden_layers, layer_kinds(found)) == (2, (LINEAR, FULL))
    found = read("NemotronHForCausalLM", hybrid_override_pattern="M-*EM", num_hidden_layers=3)
    assert (found.num_hidden_layers, layer_kinds(found, KINDS)) == (5, (LINEAR, MLP, FULL, MOE, LINEAR))


OWN = [
    (architecture, own, common)
    for architecture, words in WORDS.items()
    for own, common in words.items()
    if common not in ("layer_types", "head_dim", "intermediate_size")
]


@pytest.mark.parametrize(("architecture", "own", "common"), OWN, ids=lambda value: value)
def test_an_architectures_own_word_counts_before_the_common_one(architecture: str, own: str, common: str) -> None:
    texts, truths = ("silu", "relu"), (True, False)
    for mine, usual in ((0.5, 0.25), (3, 2), texts, truths, truths[::-1]):
        try:
            found = read(architecture, **{own: mine, common: usual})
        except ConfigError:
            continue
        assert found.words[common] == mine
        assert read(architecture, **{own: mine}).words[common] == mine
        return
    pytest.fail(f"no value was taken for {own}")


@pytest.mark.parametrize("architecture", sorted(name for name, words in WORDS.items() if "qk_rope_head_dim" in words))
def test_only_rotated_elements_of_latent_heads_have_frequencies(architecture: str) -> None:
    assert read(architecture, qk_rope_head_dim=24, head_dim=50).head_dim == 24


@pytest.mark.parametrize(("method", "groups"), [(None, (1, 1)), ("greedy", (1, 1)), ("group_limited_greedy", (4, 2))])
def test_a_greedy_choice_of_experts_knows_no_groups(method: str | None, groups: tuple[int, int]) -> None:
    given = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    moe = read("DeepseekV2ForCausalLM", **given, **({} if method is None else {"topk_method": method})).moe
    assert moe is not None and (moe.num_groups, moe.top_groups) == groups
    wanted: Any = transformers.DeepseekV2Config(**SIZES)
    assert wanted.topk_method == "greedy"


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_attention_with_an_indexer_is_full_attention(architecture: str) -> None:
    found = read(architecture, layer_types=["indexed_attention", "full_attention"] * 2)
    assert list(found.words["layer_types"]) == ["full_attention"] * 4
    assert found.sliding_windows == (None,) * 4
    assert read(architecture).sliding_windows == (None,) * 4


V4: dict[str, Any] = {
    "num_key_value_heads": 1,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("given", "rotated"),
    [
        ({}, 64),
        ({"qk_rope_head_dim": 32}, 32),
        ({"partial_rotary_factor": 0.25}, 32),
        ({"qk_rope_head_dim": 64, "partial_rotary_factor": 0.75}, 96),
        ({"qk_rope_head_dim": 16, "head_dim": 64}, 16),
    ],
    ids=str,
)
def test_the_rotated_part_of_a_compressed_head_has_two_words(given: dict[str, Any], rotated: int) -> None:
    assert compressed_config(read("DeepseekV4ForCausalLM", **{**V4, **given})).rope_dim == rotated


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"moe_intermediate_size": 24}, 24),
        ({"moe_intermediate_size": None}, 72),
        ({"moe_intermediate_size": 24, "intermediate_size": None}, 24),
        ({"moe_intermediate_size": None, "intermediate_size": None}, 2048),
    ],
    ids=str,
)
def test_all_blocks_of_a_compressed_model_have_the_size_of_an_expert(given: dict[str, Any], size: int) -> None:
    wanted: Any = transformers.DeepseekV4Config()
    assert wanted.moe_intermediate_size == 2048
    found = read("DeepseekV4ForCausalLM", **{**V4, **given})
    assert found.moe is not None and (found.intermediate_size, found.moe.intermediate_size) == (size, size)


@pytest.mark.parametrize(("own", "common"), [("window_size", "sliding_window"), ("n_hash_layers", "num_hash_layers")])
def test_published_words_of_a_compressed_model_mean_the_saved_ones(own: str, common: str) -> None:
    base = {name: value for name, value in V4.items() if name != common}
    given = {"num_hash_layers": 1, **base, own: 3} if own == "window_size" else {**base, own: 3}
    found = compressed_config(read("DeepseekV4ForCausalLM", **given))
    assert (found.window, sum(found.is_hashed)) == ((3, 1) if own == "window_size" else (128, 3))


@pytest.mark.parametrize("given", [{}, {"intermediate_size": 100}, {"block_multiple_of": 48}], ids=str)
def test_blocks_of_lfm2_have_the_size_that_the_library_computes(given: dict[str, Any]) -> None:
    base = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    wanted = Lfm2MLP(transformers.Lfm2Config(**{**base, **given})).w1.out_features
    assert read("Lfm2ForCausalLM", **{"intermediate_size": None, **given}).intermediate_size == wanted


@pytest.mark.parametrize("given", [{}, {"num_dense_layers": 1}, {"num_dense_layers": 0}, {"num_dense_layers": 4}])
def test_the_first_layers_of_lfm2_with_experts_are_dense(given: dict[str, int]) -> None:
    wanted: Any = transformers.Lfm2MoeConfig(**{**SIZES, **given})
    found = read("Lfm2MoeForCausalLM", layer_types=["conv"] * 4, **given)
    assert found.moe is not None
    assert found.moe.layers == tuple(layer >= wanted.num_dense_layers for layer in range(4))


@pytest.mark.parametrize(("said", "wanted"), [("-Infinity", -float("inf")), ("0.25", 0.25), ("Infinity", float("inf"))])
def test_a_limit_that_json_has_no_word_for_is_read_by_its_own(said: str, wanted: float) -> None:
    for limits in ([{"__float__": said}, 9.0], [-9.0, {"__float__": said}]):
        found = mamba2_config(read("GraniteMoeHybridForCausalLM", time_step_limit=limits))
        assert (found.dt_min, found.dt_max) == tuple(wanted if isinstance(each, dict) else each for each in limits)
