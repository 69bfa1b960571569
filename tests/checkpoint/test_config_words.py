"""What single keys of a `config.json` mean: which of two counts, what null does, and where a bound
is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import Qwen3MoeConfig

from sglcore.checkpoint.config_types import KINDS
from sglcore.checkpoint.frozen_draft_config import flat_words
from sglcore.checkpoint.model_config import ModelConfig, check_context, config_of, read_config, served
from sglcore.checkpoint.quantization_config import has_mxfp4_experts
from sglcore.core.errors import ConfigError
from sglcore.models.architecture_registry import ARCHITECTURES

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


def read(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    """Read a configuration; only its path is not there."""
    return config_of(Path("nowhere"), {**SIZES, "architectures": [architecture], **changes})


def test_the_first_of_several_architectures_counts() -> None:
    found = read(architectures=["MistralForCausalLM", "LlamaForCausalLM"])
    assert found.architecture == "MistralForCausalLM" and set(found.sliding_windows) == {4096}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Lama3ForCausalLM", "such as LlamaForCausalLM"),
        ("Qwen3ForSequenceClassification", "such as Qwen3ForCausalLM, Qwen3MoeForCausalLM"),
        ("XyzForCausalLM", ""),
    ],
)
def test_an_unknown_architecture_is_told_the_names_that_are_like_its_own(name: str, near: str) -> None:
    said = served(name, {"LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})
    assert said == f"one that docs/models.md lists{', ' if near else ''}{near}"


@pytest.mark.parametrize("asked", [None, 1, 63, 64])
def test_a_context_may_be_as_long_as_the_checkpoints(asked: int | None) -> None:
    check_context(asked, read())


def test_a_context_beyond_the_checkpoints_is_refused_with_its_length() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 65, the checkpoint's context is 64; set .* at most 64"):
        check_context(65, read())
    scaled = read(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    check_context(256, scaled)
    with pytest.raises(ConfigError, match="max_model_len is 257, the checkpoint's context is 256"):
        check_context(257, scaled)


def test_a_head_without_a_size_of_its_own_has_its_share_of_the_hidden_state() -> None:
    assert read().head_dim == 12
    assert read(head_dim=None).head_dim == read(head_dim=0).head_dim == 12
    assert read(head_dim=20).head_dim == 20


@pytest.mark.parametrize(
    ("architecture", "given", "scaling"),
    [
        ("LlamaForCausalLM", {"head_dim": 16}, 0.25),
        ("Gemma2ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": 64}, 0.125),
        ("Gemma2ForCausalLM", {"head_dim": 16, "query_pre_attn_scalar": None}, 0.25),
        ("GraniteForCausalLM", {"head_dim": 16}, 1.0),
        ("GraniteForCausalLM", {"head_dim": 16, "attention_multiplier": 0.5}, 0.5),
        ("GraniteForCausalLM", {"head_dim": 16, "attention_multiplier": 0.5, "query_pre_attn_scalar": 4}, 0.5),
    ],
)
def test_scores_are_scaled_by_the_files_own_number(architecture: str, given: dict[str, Any], scaling: float) -> None:
    assert read(architecture, **given).attention_scaling == scaling


@pytest.mark.parametrize(
    ("given", "is_biased"),
    [
        ({}, True),
        ({"qkv_bias": False}, False),
        ({"qkv_bias": None}, False),
        ({"attention_bias": False}, False),
        ({"attention_bias": True, "qkv_bias": False}, True),
    ],
)
def test_biases_of_attention_have_two_names(given: dict[str, Any], is_biased: bool) -> None:
    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "num_key_value_heads": 4}
    assert read("Qwen2MoeForCausalLM", **sizes, **given).attention_bias is is_biased


@pytest.mark.parametrize(
    ("architecture", "given", "act"),
    [
        ("LlamaForCausalLM", {}, "silu"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "gelu"),
        ("GemmaForCausalLM", {"hidden_act": "gelu"}, "gelu_pytorch_tanh"),
        ("GemmaForCausalLM", {"hidden_act": "relu"}, "relu"),
        ("GemmaForCausalLM", {"hidden_act": "relu", "hidden_activation": "gelu"}, "gelu_pytorch_tanh"),
        ("Gemma2ForCausalLM", {"hidden_activation": "gelu"}, "gelu"),
    ],
)
def test_old_gemmas_alone_mean_another_function_by_gelu(architecture: str, given: dict[str, Any], act: str) -> None:
    assert read(architecture, head_dim=12, **given).hidden_act == act


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}, ("default", 1e4, 1.0, 64)),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, ("default", 1e4, 1.0, 64)),
        ({"rope_scaling": {"type": "yarn", "short_factor": [1.0], "long_factor": [1.0]}}, ("longrope", 1e4, 1.0, 64)),
        ({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, ("default", 5e5, 0.5, 64)),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 7e5}}, ("default", 7e5, 1.0, 64)),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e3}},
            ("default", 1e3, 0.25, 64),
        ),
        (
            {
                "original_max_position_embeddings": 16,
                "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32},
            },
            ("yarn", 1e4, 1.0, 16),
        ),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": None}}, ("yarn", 1e4, 1.0, 64)),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}}, ("yarn", 1e4, 1.0, 64)),
        ({"rope_parameters": None, "rope_scaling": None}, ("default", 1e4, 1.0, 64)),
    ],
    ids=str,
)
def test_the_more_particular_of_two_rotary_words_counts(given: dict[str, Any], wanted: Any) -> None:
    rope = read(head_dim=16, **given).rope
    assert (rope.kind, rope.theta, rope.partial, rope.original_max) == wanted
    assert not {"rope_theta", "partial_rotary_factor", "type", "rope_type"} & rope.scaling.keys()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("yarn", 150000.0, 32.0)),
        ({"rope_parameters": None}, ("yarn", 150000.0, 32.0)),
        ({"rope_theta": 1e3}, ("yarn", 1e3, 32.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear", 150000.0, 2.0)),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 4.0}}, ("linear", 1e3, 4.0)),
    ],
    ids=str,
)
def test_older_words_replace_a_rotary_default_as_a_whole(given: dict[str, Any], wanted: Any) -> None:
    rope = read("GptOssForCausalLM", num_local_experts=8, **given).rope
    assert (rope.kind, rope.theta, rope.scaling["factor"]) == wanted


@pytest.mark.parametrize("factor", [None, 0.5, 1.0, 4.0])
def test_a_context_is_extended_by_yarn_alone(factor: float | None) -> None:
    for kind in ("linear", "dynamic", "yarn"):
        scaling = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": 32}
        extended = max(64, int(32 * (factor or 1.0))) if kind == "yarn" else 64
        found = read(rope_scaling=scaling)
        assert (found.context_length, found.max_position_embeddings) == (extended, 64)


SPARSE: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ({}, "EEEEEE"),
        ({"decoder_sparse_step": 2}, "DEDEDE"),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [5]}, "DDEDDD"),
        ({"mlp_only_layers": [0, 4]}, "DEEEDE"),
        ({"first_k_dense_replace": 1}, "DEEEEE"),
        ({"first_k_dense_replace": 6}, "DDDDDD"),
        ({"mlp_layer_types": ["sparse", "dense", *["sparse"] * 4], "first_k_dense_replace": 6}, "EDEEEE"),
    ],
    ids=str,
)
def test_layers_have_experts_as_the_words_say(given: dict[str, Any], layers: str) -> None:
    moe = read("Qwen3MoeForCausalLM", **SPARSE, **given).moe
    assert moe is not None and "".join("DE"[has] for has in moe.layers) == layers
    if not {"mlp_layer_types", "first_k_dense_replace"} & given.keys():
        own: Any = Qwen3MoeConfig(**{**SIZES, **SPARSE, **given})
        sparse = [n not in own.mlp_only_layers and (n + 1) % own.decoder_sparse_step == 0 for n in range(6)]
        assert list(moe.layers) == sparse


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({}, (2, 8, False, 1.0, 1, 1, 0)),
        ({"n_shared_experts": 3}, (2, 8, False, 1.0, 1, 1, 24)),
        ({"n_shared_experts": 3, "shared_expert_intermediate_size": 40}, (2, 8, False, 1.0, 1, 1, 40)),
        ({"n_group": 2, "topk_group": 2, "norm_topk_prob": True}, (2, 8, True, 1.0, 2, 2, 0)),
        ({"routed_scaling_factor": 2.5, "moe_intermediate_size": 20}, (2, 20, False, 2.5, 1, 1, 0)),
    ],
    ids=str,
)
def test_numbers_of_experts_are_the_files(given: dict[str, Any], numbers: tuple[Any, ...]) -> None:
    moe = read("Qwen3MoeForCausalLM", **{**SPARSE, **given}).moe
    assert moe is not None and moe.num_experts == 4
    found = (moe.experts_per_token, moe.intermediate_size, moe.normalize, moe.scale, moe.num_groups, moe.top_groups)
    assert (*found, moe.shared_size) == numbers


@pytest.mark.parametrize(
    ("experts", "given", "fits"),
    [
        (1, {"num_experts_per_tok": 1}, True),
        (4, {"num_experts_per_tok": 4}, True),
        (4, {"num_experts_per_tok": 5}, False),
        (4, {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}, True),
        (4, {"num_experts_per_tok": 3, "n_group": 2, "topk_group": 1}, False),
        (4, {"num_experts_per_tok": 4, "n_group": 2, "topk_group": 2}, True),
        (4, {"num_experts_per_tok": 5, "first_k_dense_replace": 6}, True),
    ],
    ids=str,
)
def test_a_token_uses_no_more_experts_than_its_groups_have(experts: int, given: dict[str, Any], fits: bool) -> None:
    words = {**SPARSE, "num_experts": experts, **given}
    if fits:
        assert read("Qwen3MoeForCausalLM", **words).moe is not None
        return
    with pytest.raises(ConfigError, match=rf"has {given['num_experts_per_tok']} experts per token, from .* experts; "):
        read("Qwen3MoeForCausalLM", **words)


@pytest.mark.parametrize(
    ("name", "least"),
    [(name, int("above zero" in kind[0])) for name, kind in KINDS.items() if kind[0].startswith("a whole")],
)
def test_a_whole_number_is_taken_from_its_least_on(name: str, least: int) -> None:
    wanted, fits = KINDS[name]
    assert fits(least) and fits(10**9), wanted
    assert not any(fits(value) for value in (least - 1, float(least + 1), True, str(least), None, [least])), wanted


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("rms_norm_eps", (0, -1, 1e-5), (float("nan"), float("inf"), "1", True)),
        ("factor", (1, 1e-9), (0, -1.0, float("inf"), True)),
        ("beta_fast", (0, 0.5), (-1e-9, float("nan"), False)),
        ("mamba_d_head", ("auto", 1), (0, "automatic", 1.0)),
        ("time_step_limit", ([0, 1], [0.0, {"__float__": "Infinity"}]), ([0], [0, 1, 2], [0, "1"], [0, {}], (0, 1))),
        ("mrope_section", ([1, 2, 3], [0, 0, 0]), ([1, 2], [1, 2, 3, 4], [1, 2, -1], [1, 2, 3.0])),
        ("index_topk_pattern", ("FS", ["full"]), (1, {})),
        ("tie_word_embeddings", (True, False), (0, 1, "true")),
        ("hidden_act", ("silu", ""), (1, ["silu"])),
        ("architectures", ([], ["a"]), ("a", [1], ["a", None])),
        ("mlp_only_layers", ([], [1, 2]), ([1.0], [True], ["1"], 1)),
        ("long_factor", ([1, 2.0],), (["1"], [True], 1.0)),
        ("rope_scaling", ({},), ([], "linear")),
    ],
)
def test_every_kind_of_value_has_its_bounds(name: str, taken: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    wanted, fits = KINDS[name]
    assert all(fits(value) for value in taken), wanted
    assert [value for value in refused if fits(value)] == [], wanted


LIBRARY = sorted(
    {getattr(transformers, name).config_class for name in ARCHITECTURES if hasattr(transformers, name)}, key=str
)


@pytest.mark.parametrize("made", LIBRARY, ids=lambda made: made.__name__)
def test_values_of_the_library_are_of_the_kinds_that_are_wanted(made: Any) -> None:
    for name, value in made().to_dict().items():
        if name not in KINDS or value is None:
            continue
        wanted, fits = KINDS[name]
        assert fits(list(value) if isinstance(value, tuple) else value), (name, value, wanted)
        assert isinstance(value, bool) == (wanted == "true or false"), name


SIZED = """conv_L_cache moe_latent_size type_vocab_size draft_vocab_size target_hidden_size max_seq_len mamba_d_conv
    mamba_d_state o_lora_rank q_lora_rank index_topk hc_sinkhorn_iters block_multiple_of n_group topk_group o_groups
    sliding_window_pattern full_attention_interval kv_lora_rank qk_nope_head_dim v_head_dim index_n_heads index_head_dim
    hc_mult compress_rate_csa compress_rate_hca mamba_n_heads mamba_n_groups mamba_expand decoder_sparse_step
    linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"""
SCALES = """logits_scaling attention_multiplier query_pre_attn_scalar attn_logit_softcapping rope_theta hc_eps factor
    global_rope_theta local_rope_theta rope_local_base_freq final_logit_softcapping compress_rope_theta
    block_ffn_dim_multiplier low_freq_factor high_freq_factor"""


@pytest.mark.parametrize("name", [*SIZED.split(), *SCALES.split()])
def test_a_size_of_tensors_or_a_divisor_is_above_zero(name: str) -> None:
    with pytest.raises(ConfigError, match=f"has {name} = 0; wanted a (whole )?number above zero"):
        read("LlamaForCausalLM", **{name: 0})


@pytest.mark.parametrize(
    ("outer", "inner", "value"),
    [
        ("sentence_transformers", "activation_fn", 3),
        ("text_config", "hidden_size", "many"),
        ("rope_parameters", "main", []),
        ("compress_rates", "factor", "x"),
        ("eagle_config", "eagle_aux_hidden_state_layer_ids", ["1"]),
        ("dflash_config", "hidden_act", 1),
        ("transformer_layer_config", "num_attention_heads", 0),
    ],
)
def test_values_in_every_kind_of_object_are_checked(outer: str, inner: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"has {inner} = .*; wanted {KINDS[inner][0]}; download"):
        read("LlamaForCausalLM", **{outer: {inner: value}})


@pytest.mark.parametrize("name", ["indexer_types", "architectures", "layer_types", "mlp_layer_types"])
def test_a_list_of_texts_has_texts_alone(name: str) -> None:
    with pytest.raises(ConfigError, match=f"has {name} = .*; wanted a list of texts; download"):
        read("LlamaForCausalLM", **{name: ["full", 1]})


def test_values_in_objects_are_checked_by_their_own_names(tmp_path: Path) -> None:
    given = {**SIZES, "architectures": ["LlamaForCausalLM"], "rope_parameters": {"full_attention": {"factor": 0}}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match="has factor = 0; wanted a number above zero; download the checkpoint"):
        read_config(tmp_path)


def test_words_of_a_draft_are_those_of_its_text_part_unless_it_says_other() -> None:
    rope = {"sliding_attention": {"rope_theta": 7.0}, "full_attention": {"rope_theta": 9.0}}
    raw = {"hidden_size": 4, "text_config": {"hidden_size": 8, "head_dim": 2, "rope_parameters": rope}}
    found = {"hidden_size": 4, "head_dim": 2, "rope_parameters": rope, "rope_local_base_freq": 7.0}
    assert flat_words(raw) == found
    assert flat_words({"hidden_size": 4}) == {"hidden_size": 4}
    assert flat_words({**raw, "rope_local_base_freq": 5.0})["rope_local_base_freq"] == 5.0


def test_only_mxfp4_has_experts_in_mxfp4() -> None:
    assert has_mxfp4_experts({"quantization_config": {"quant_method": "mxfp4"}})
    assert not has_mxfp4_experts({"quantization_config": {"quant_method": "fp8"}})
    assert not has_mxfp4_experts({})
