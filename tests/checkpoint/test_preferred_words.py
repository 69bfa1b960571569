"""Which of two words counts if a `config.json` has both, and which kinds of layers it may list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from sglcore.checkpoint.config_defaults import OPTIONS
from sglcore.checkpoint.model_config import ModelConfig, config_of
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


def read(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    """Read a configuration; only its path is not there."""
    return config_of(Path("nowhere"), {**SIZES, "architectures": [architecture], **changes})


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16", "torch_dtype": None}, "bfloat16"),
        ({"dtype": None, "torch_dtype": None}, "float32"),
    ],
    ids=str,
)
def test_the_newer_word_for_the_dtype_counts(given: dict[str, Any], dtype: str) -> None:
    assert read(**given).dtype == dtype


@pytest.mark.parametrize("given", [{"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": "relu"}])
def test_the_newer_word_for_the_activation_counts(given: dict[str, str]) -> None:
    assert read("Qwen3ForCausalLM", head_dim=16, **given).hidden_act == given.get("hidden_activation", "gelu")


def test_older_rotary_words_count_before_newer_ones_as_in_the_library() -> None:
    given: dict[str, Any] = {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    }
    wanted: Any = transformers.LlamaConfig(**SIZES, **given).rope_parameters
    found = read(**given).rope
    assert (found.kind, found.theta, found.scaling["factor"]) == ("linear", wanted["rope_theta"], wanted["factor"])
    assert wanted["factor"] == 8.0


FULL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
WINDOWED = {"rope_type": "default", "rope_theta": 3e3}


def test_layers_with_a_window_have_the_base_of_their_own_entry() -> None:
    both = {"full_attention": FULL, "sliding_attention": WINDOWED}
    given = {"rope_parameters": both, "rope_local_base_freq": 7e3}
    found = read("Gemma3ForCausalLM", **given)
    assert found.local_rope is not None
    assert (found.rope.theta, found.local_rope.theta) == (5e5, 3e3)
    assert (found.rope.kind, found.rope.scaling["factor"]) == ("linear", 8.0)
    assert (found.local_rope.kind, dict(found.local_rope.scaling)) == ("default", {})


def test_layers_with_a_window_whose_entry_has_no_base_have_the_files_local_one() -> None:
    both = {"full_attention": FULL, "sliding_attention": {"rope_type": "default"}}
    found = read("Gemma3ForCausalLM", rope_parameters=both, rope_local_base_freq=7e3)
    assert found.local_rope is not None and found.local_rope.theta == 7e3


def test_an_older_scaling_is_that_of_layers_without_a_window() -> None:
    both = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": WINDOWED}
    found = read("Gemma3ForCausalLM", rope_parameters=both, rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert found.local_rope is not None
    assert (found.rope.kind, found.rope.theta, found.rope.scaling["factor"]) == ("linear", 5e5, 4.0)
    assert (found.local_rope.kind, found.local_rope.theta) == ("default", 3e3)


def test_a_scaling_without_entries_for_layers_leaves_those_with_a_window_as_they_are() -> None:
    found = read("Gemma3ForCausalLM", rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert found.local_rope is not None
    assert (found.rope.kind, found.local_rope.kind, dict(found.local_rope.scaling)) == ("linear", "default", {})


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("Gemma3ForCausalLM", ("full_attention",)),
        ("Gemma3ForCausalLM", ("sliding_attention",)),
        ("Gemma3ForCausalLM", ("full_attention", "sliding_attention", "main")),
        ("LlamaForCausalLM", ("full_attention", "sliding_attention")),
    ],
)
def test_rotary_entries_are_those_of_layers_with_and_without_a_window(
    architecture: str, names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=rf"rope parameters differ by layer \({', '.join(names)}\); wanted one set"):
        read(architecture, rope_parameters=dict.fromkeys(names, WINDOWED))


@pytest.mark.parametrize("kind", ["sparse", "moe", "hash_moe"])
def test_every_layer_that_is_not_dense_has_experts(kind: str) -> None:
    given = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
    moe = read("Qwen3MoeForCausalLM", **given, mlp_layer_types=[kind, "dense", "dense", kind]).moe
    assert moe is not None and moe.layers == (True, False, False, True)


EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"num_experts": 4}, 4),
        ({"num_local_experts": 6}, 6),
        ({"n_routed_experts": 8}, 8),
        ({"num_experts": 4, "num_local_experts": 6, "n_routed_experts": 8}, 4),
        ({"num_local_experts": 6, "n_routed_experts": 8}, 6),
        ({"num_experts": 0, "num_local_experts": 0, "n_routed_experts": 8}, 8),
        ({"num_experts": None, "n_routed_experts": 8}, 8),
    ],
    ids=str,
)
def test_the_number_of_experts_has_three_names(given: dict[str, Any], count: int) -> None:
    moe = read(**EXPERTS, **given).moe
    assert moe is not None and moe.num_experts == count


@pytest.mark.parametrize("given", [{}, {"num_experts": 0}, {"n_routed_experts": None}], ids=str)
def test_without_a_number_of_experts_there_are_none(given: dict[str, Any]) -> None:
    assert read(**EXPERTS, **given).moe is None


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts"])
@pytest.mark.parametrize("given", [{}, {"n_shared_experts": 2}, {"moe_intermediate_size": None}], ids=str)
def test_experts_without_a_size_are_none(name: str, given: dict[str, Any]) -> None:
    assert read(**{name: 4}, num_experts_per_tok=2, **given).moe is None


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({"num_local_experts": 4}, 72),
        ({"num_local_experts": 4, "moe_intermediate_size": 8}, 8),
        ({"num_experts": 4, "moe_intermediate_size": 8}, 8),
        ({"num_experts": 4, "moe_intermediate_size": 8, "num_local_experts": 4}, 8),
    ],
    ids=str,
)
def test_an_expert_has_its_own_size_or_that_of_dense_blocks(given: dict[str, Any], size: int) -> None:
    moe = read(num_experts_per_tok=2, **given).moe
    assert moe is not None and moe.intermediate_size == size


CHANGING: dict[str, tuple[Any, Any]] = {
    "attention_multiplier": (None, 0.5),
    "attn_logit_softcapping": (None, 5.0),
    "embedding_multiplier": (1.0, 2.0),
    "final_logit_softcapping": (None, 3.0),
    "logits_scaling": (1.0, 4.0),
    "mamba_hidden_act": ("silu", "relu"),
    "n_group": (1, 2),
    "n_shared_experts": (0, 1),
    "query_pre_attn_scalar": (None, 64),
    "residual_multiplier": (1.0, 0.5),
    "rope_local_base_freq": (None, 5e3),
    "routed_scaling_factor": (1.0, 2.5),
    "shared_expert_intermediate_size": (0, 24),
    "swiglu_alpha": (None, 1.5),
    "swiglu_limit": (None, 7.0),
    "use_expert_bias": (True, False),
    "use_qk_norm": (False, True),
    "use_bidirectional_attention": (False, True),
}
"""Options that not every architecture knows: the value that changes nothing, and one that does."""


@pytest.mark.parametrize("name", CHANGING)
def test_an_option_is_listed_if_it_changes_something(name: str) -> None:
    neutral, other = CHANGING[name]
    assert OPTIONS.keys() == CHANGING.keys()
    assert read(**{name: neutral}).options == read().options == {}
    assert read(**{name: other}).options == {name: other}


@pytest.mark.parametrize("name", ["num_key_value_heads", "rms_norm_eps", "rope_theta", "max_window_layers"])
def test_null_in_a_language_part_leaves_the_architectures_default(name: str) -> None:
    given = {word: value for word, value in SIZES.items() if word != "num_key_value_heads"}
    given |= {"num_attention_heads": 16, "use_sliding_window": True, "sliding_window": 6, "num_hidden_layers": 82}
    raw: dict[str, Any] = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    plain = config_of(Path("nowhere"), {**raw, "text_config": given})
    found = config_of(Path("nowhere"), {**raw, "text_config": {**given, name: None}})
    assert (found.num_key_value_heads, found.rms_norm_eps, found.rope.theta) == (8, 1e-5, 1e6)
    assert found.sliding_windows == plain.sliding_windows == (None,) * 80 + (6, 6)


@pytest.mark.parametrize("given", [{"text_config": None}, {"text_config": {}}, {}], ids=str)
def test_without_a_language_part_the_words_are_those_of_the_file(given: dict[str, Any]) -> None:
    found = read("Qwen2_5_VLForConditionalGeneration", **given)
    assert (found.hidden_size, found.num_key_value_heads) == (SIZES["hidden_size"], SIZES["num_key_value_heads"])
