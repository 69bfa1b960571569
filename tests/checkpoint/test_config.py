"""Reading `config.json`: both dialects, defaults that differ by architecture, and errors that name
the remedy."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from sglcore.checkpoint.config_defaults import DEFAULTS, OPTIONS
from sglcore.checkpoint.model_config import ModelConfig, MoeConfig, read_config
from sglcore.checkpoint.recurrent_config import FULL, delta_net_config, layer_kinds, mamba2_config
from sglcore.core.errors import ConfigError
from sglcore.models.architecture_registry import ARCHITECTURES, model_class
from tests.checkpoints import CAUSAL
from tests.latent import LATENT

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}

MOE = {"num_experts": 4, "moe_intermediate_size": 8}


ALIKE = {"MiMoForCausalLM": "Qwen2ForCausalLM"}
"""Architectures with their own class in the checkpoint, and the transformers architecture that this
class derives from."""
HAS_WINDOW = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


def read(folder: Path, changes: dict) -> ModelConfig:
    """Write a configuration and read it."""
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    return read_config(folder, ARCHITECTURES)


NO_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
"""The rotary settings of a model without rotary embeddings."""


def epsilon(config: dict[str, Any]) -> float:
    """The epsilon of norms, under any of its names."""
    return next(config[name] for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if name in config)


@pytest.mark.parametrize("name", [*CAUSAL, *LATENT])
def test_what_is_read_is_what_the_oracle_has(tmp_path, name: str) -> None:
    model = {**CAUSAL, **LATENT}[name]()
    oracle = model.config
    oracle.architectures = [type(model).__name__]
    oracle.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    for field in (
        "hidden_size",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert getattr(config, field) == getattr(oracle, field, None) or field == "head_dim", field
    wanted = oracle.to_dict()
    assert config.rms_norm_eps == epsilon(wanted)
    rope = wanted.get("rope_parameters", NO_ROPE)
    full, local = rope.get("full_attention", rope.get("main", rope)), rope.get("sliding_attention")
    for found, wanted in ((config.rope, full), (config.local_rope, local)):
        assert (found and (found.theta, found.kind)) == (wanted and (wanted["rope_theta"], wanted["rope_type"]))


def test_old_and_new_rope_dialects_read_the_same(tmp_path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    new = read(tmp_path, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}})
    old = read(tmp_path, {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}})
    oldest = read(tmp_path, {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    assert new.rope == old.rope == oldest.rope
    assert (new.rope.theta, new.rope.original_max) == (5e5, 32)


def test_yarn_extends_the_context_and_never_shortens_it(tmp_path) -> None:
    for factor, original, context in ((4.0, 64, 256), (4.0, 16, 64), (2.0, 16, 64), (1.5, 64, 96)):
        scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        assert read(tmp_path, {"rope_scaling": scaling}).context_length == context
    assert read(tmp_path, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}).context_length == 64


@pytest.mark.parametrize(
    ("architecture", "changes", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None,) * 4),
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, (None,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 8),
        ),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (8, None, 8, None),
        ),
    ],
)
def test_windows_follow_the_architectures_own_rules(tmp_path, architecture, changes, windows) -> None:
    changes = {"num_key_value_heads": 2, "architectures": [architecture], **changes}
    assert read(tmp_path, changes).sliding_windows == windows


WINDOWED = sorted(
    name
    for name in ARCHITECTURES
    if name in DEFAULTS
    and name != "NemotronHForCausalLM"  # which has the key but no sliding-window layer
    and "sliding_window" in getattr(transformers, ALIKE.get(name, name)).config_class().to_dict()
)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_windows_are_those_of_the_library_whatever_switches_them(tmp_path, architecture: str) -> None:
    base = {name: value for name, value in BASE.items() if name != "architectures"} | {"sliding_window": 6}
    words = getattr(transformers, ALIKE.get(architecture, architecture)).config_class().to_dict()
    for uses, first in itertools.product((True, False), (0, 1, 3, 9)):
        given = {"use_sliding_window": uses, "max_window_layers": first}
        given = {**base, **{name: value for name, value in given.items() if name in words}}
        wanted = getattr(transformers, ALIKE.get(architecture, architecture)).config_class(**given).to_dict()
        kinds = wanted.get("layer_types") or ["sliding_attention"] * 4
        window = wanted["sliding_window"]
        found = read(tmp_path, {"architectures": [architecture], "num_key_value_heads": 1, "head_dim": 12, **given})
        assert found.sliding_windows == tuple(window if kind in HAS_WINDOW else None for kind in kinds), given


def test_dtype_is_read_in_both_spellings(tmp_path) -> None:
    assert read(tmp_path, {"torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert read(tmp_path, {"dtype": "torch.float16"}).dtype == "float16"
    assert read(tmp_path, {}).dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"architectures": ["Lama3ForCausalLM"]},
            r"'Lama3ForCausalLM' is not supported; wanted .*, such as LlamaForCausalLM, ",
        ),
        ({"architectures": []}, "names no architecture"),
        (
            {"architectures": "LlamaForCausalLM"},
            "has architectures = 'LlamaForCausalLM'; wanted a list of texts; download",
        ),
        ({"hidden_size": "many"}, "has hidden_size = 'many'; wanted a whole number above zero"),
        ({"num_hidden_layers": 2.0}, "has num_hidden_layers = 2.0; wanted a whole number above zero"),
        ({"vocab_size": True}, "has vocab_size = True; wanted a whole number above zero"),
        ({"sliding_window": -1}, "has sliding_window = -1; wanted a whole number"),
        ({"rms_norm_eps": "1e-6"}, "has rms_norm_eps = '1e-6'; wanted a number"),
        ({"tie_word_embeddings": "false"}, "has tie_word_embeddings = 'false'; wanted true or false"),
        ({"final_logit_softcapping": 0}, "has final_logit_softcapping = 0; wanted a number above zero"),
        ({"mamba_d_head": "wide"}, "has mamba_d_head = 'wide'; wanted a whole number above zero, or auto"),
        ({"time_step_limit": [1]}, r"has time_step_limit = \[1\]; wanted a list of two limits"),
        ({"hidden_size": 3}, "gives 3 elements to 4 heads; wanted at least one element per head"),
        ({"rope_scaling": "linear"}, "has rope_scaling = 'linear'; wanted a JSON object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "has factor = '8'; wanted a number"),
        ({"mlp_only_layers": [0, "1"]}, "has mlp_only_layers = .*; wanted a list of whole numbers"),
        (
            {"layer_types": ["full_attention", "chunked_attention"] * 2},
            "has layers of 'chunked_attention'; wanted one of att",
        ),
        ({**MOE, "num_experts_per_tok": 5}, "has 5 experts per token, from 1 of 1 groups of 4 experts"),
        ({**MOE, "num_experts_per_tok": 0}, "has 0 experts per token"),
        ({**MOE, "num_experts_per_tok": 3, "n_group": 2}, "has 3 experts per token, from 1 of 2 groups"),
        ({**MOE, "num_experts_per_tok": 1, "n_group": 3}, "from 1 of 3 groups of 4 experts"),
        (
            {**MOE, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 3},
            "2 experts per token, from 3 of 2 groups",
        ),
        (
            {"architectures": ["Lfm2ForCausalLM"], "norm_eps": "small"},
            "has norm_eps = 'small'; wanted a number",
        ),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_key_value_heads": 3}, "4 query heads for 3 key-value heads; wanted a multiple"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"differ by layer \(full_attention\)"),
        ({"num_attention_heads": 4, "head_dim": 7}, "rotates 7 elements of a head; wanted an even number"),
        (
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"]},
            "has 1 layer_types; wanted 4",
        ),
    ],
)
def test_a_configuration_that_can_not_be_used_is_an_error(tmp_path, changes: dict, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        read(tmp_path, changes)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_checkpoint_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="there is no model at '.*nowhere'"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_config(tmp_path)


def test_a_mapping_adds_architectures_and_wins(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "architectures": ["Mine"]}))
    extra = {"Mine": "sglcore.models.architectures.llama:LlamaForCausalLM"}
    assert read_config(tmp_path, extra).architecture == "Mine"
    assert model_class("Mine", extra).__name__ == "LlamaForCausalLM"  # pyright: ignore[reportAttributeAccessIssue]


PUBLISHED: tuple[tuple[dict, dict], ...] = (
    (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        {"sliding_windows": (512,) * 5 + (None, 512), "tie_word_embeddings": True, "attention_scaling": 1 / 16},
    ),
    (
        {"architectures": ["GemmaForCausalLM"], "num_key_value_heads": 1, "hidden_act": "gelu", "head_dim": 16},
        {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    ),
    (
        {
            "architectures": ["GptOssForCausalLM"],
            "num_key_value_heads": 2,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
        {
            "sliding_windows": (128, None, 128, None),
            "context_length": 131072,
            "attention_bias": True,
            "options": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        },
    ),
    (
        {
            "architectures": ["Phi3ForCausalLM"],
            "num_key_value_heads": 2,
            "head_dim": 16,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"long_factor": [2.0] * 6, "short_factor": [1.0] * 6, "type": "su"},
            "sliding_window": 2047,
        },
        {"sliding_windows": (2047,) * 4, "options": {}},
    ),
    (
        {
            "architectures": ["GraniteForCausalLM"],
            "num_key_value_heads": 2,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
        },
        {"attention_scaling": 0.015625},
    ),
    (
        {"architectures": ["XLMRobertaModel"], "pad_token_id": 1, "max_position_embeddings": 514},
        {"first_position": 2, "context_length": 512},
    ),
)
"""Parts of published configurations, and the values that they mean."""


@pytest.mark.parametrize(("changes", "wanted"), PUBLISHED, ids=lambda value: value.get("architectures", [""])[0])
def test_published_dialects_are_understood(tmp_path, changes: dict, wanted: dict) -> None:
    config = read(tmp_path, changes)
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_rotary_sets_of_published_dialects(tmp_path) -> None:
    gemma, _, gpt_oss, phi, *_ = (read(tmp_path, changes) for changes, _ in PUBLISHED)
    assert gemma.local_rope is not None and phi.local_rope is None
    assert (gemma.rope.kind, gemma.rope.theta, gemma.local_rope.kind, gemma.local_rope.theta) == (
        ("linear", 1e6, "default", 1e4)
    )
    assert (gpt_oss.rope.kind, gpt_oss.rope.theta, gpt_oss.rope.original_max) == ("yarn", 150000.0, 4096)
    assert (phi.rope.kind, phi.rope.partial, phi.rope.original_max) == ("longrope", 0.75, 32)


def test_experts_of_published_dialects(tmp_path) -> None:
    def moe(**changes: Any) -> MoeConfig | None:
        return read(tmp_path, {"num_key_value_heads": 2, **changes}).moe

    glm = {"n_routed_experts": 16, "n_shared_experts": 2, "moe_intermediate_size": 8, "routed_scaling_factor": 2.5}
    found = moe(architectures=["Glm4MoeForCausalLM"], first_k_dense_replace=3, **glm)
    assert found == MoeConfig((False,) * 3 + (True,), 16, 8, 8, True, 2.5, shared_size=16)
    assert moe(architectures=["MixtralForCausalLM"]) == MoeConfig((True,) * 4, 8, 2, BASE["intermediate_size"], True)
    assert moe(architectures=["LlamaForCausalLM"]) is None


SPARSE = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configurations."""


@pytest.mark.parametrize("architecture", sorted(name for name in ARCHITECTURES if name.endswith("ForCausalLM")))
def test_what_a_file_leaves_out_is_what_transformers_takes(tmp_path, architecture: str) -> None:
    given = {name: value for name, value in BASE.items() if name != "architectures"} | {"num_attention_heads": 32}
    given["hidden_size"] = 4096
    wanted = getattr(transformers, ALIKE.get(architecture, architecture)).config_class(**given).to_dict()
    found = read(tmp_path, {"architectures": [architecture], **given})
    # Models with latent attention have no number of K/V heads.
    assert found.num_key_value_heads == wanted["num_key_value_heads"] or "kv_lora_rank" in wanted
    assert found.head_dim == (wanted.get("head_dim") or wanted.get("qk_rope_head_dim") or 128)
    assert found.rms_norm_eps == epsilon(wanted)
    assert found.tie_word_embeddings == wanted["tie_word_embeddings"]
    assert found.attention_bias == wanted.get("attention_bias", wanted.get("qkv_bias", False))
    assert found.mlp_bias == wanted.get("mlp_bias", False)
    acts = ("hidden_activation", "hidden_act", "mlp_hidden_act")
    assert found.hidden_act == next((wanted[name] for name in acts if wanted.get(name)), "silu")
    rope = wanted.get("rope_parameters", NO_ROPE)
    full, local = rope.get("full_attention", rope.get("main", rope)), rope.get("sliding_attention")
    assert (found.rope.theta, found.rope.partial) == (full["rope_theta"], full.get("partial_rotary_factor", 1.0))
    assert (found.local_rope and found.local_rope.theta) == (local and local["rope_theta"])
    window = wanted.get("sliding_window")
    kinds = wanted.get("layer_types") or ["sliding_attention"] * found.num_hidden_layers
    assert found.sliding_windows == tuple(window if kind in HAS_WINDOW else None for kind in kinds)
    for name in DEFAULTS.get(architecture, {}).keys() & wanted.keys() - {"sliding_window"}:
        assert found.words[name] == wanted[name], name
    for name in OPTIONS.keys() & wanted.keys():
        value = OPTIONS[name] if wanted[name] is None else wanted[name]
        assert found.options.get(name, OPTIONS[name]) == value, name
    experts = next((wanted[name] for name in SPARSE if wanted.get(name)), None)
    assert (found.moe and found.moe.num_experts) == experts
    if found.moe is not None:
        size = wanted.get("moe_intermediate_size", wanted.get("intermediate_size"))
        assert (found.moe.experts_per_token, found.moe.intermediate_size) == (wanted["num_experts_per_tok"] or 8, size)
        assert found.moe.normalize == wanted.get("norm_topk_prob", True)


@pytest.mark.parametrize(
    ("architecture", "changes", "text"),
    [
        ("Qwen3NextForCausalLM", {"linear_num_key_heads": 3, "linear_num_value_heads": 4}, "4 value heads for 3 key"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 4, "mamba_n_groups": 3}, "gives 4 heads in 3 groups"),
    ],
)
def test_heads_with_a_state_that_can_not_be_grouped_are_refused(tmp_path, architecture, changes, text: str) -> None:
    config = read(tmp_path, {"architectures": [architecture], "num_key_value_heads": 2, **changes})
    with pytest.raises(ConfigError, match=f"{text}.*; wanted a multiple"):
        delta_net_config(config) if architecture.startswith("Qwen3Next") else mamba2_config(config)


def test_heads_of_mamba_share_what_the_layer_expands_to(tmp_path) -> None:
    given = {"mamba_expand": 3, "mamba_n_heads": 8, "mamba_d_head": "auto"}
    wanted = transformers.GraniteMoeHybridConfig(hidden_size=BASE["hidden_size"], **given)
    found = mamba2_config(read(tmp_path, {"architectures": ["GraniteMoeHybridForCausalLM"], **given}))
    assert (found.head_dim, found.inner) == (wanted.mamba_d_head, 144)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"block_ff_dim": 100, "norm_eps": 1e-4, "tie_embedding": False},
        {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 32, "full_attn_idxs": [1, 3]},
        {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    ],
)
def test_what_lfm2_calls_by_words_of_its_own(tmp_path, given: dict[str, Any]) -> None:
    base = {name: value for name, value in BASE.items() if name != "architectures"}
    wanted = transformers.Lfm2Config(**{**base, **given})
    found = read(tmp_path, {"architectures": ["Lfm2ForCausalLM"], "num_key_value_heads": 2, **given})
    assert found.intermediate_size == Lfm2MLP(wanted).w1.out_features
    assert (found.rms_norm_eps, found.tie_word_embeddings) == (wanted.norm_eps, wanted.tie_word_embeddings)
    kinds = wanted.layer_types or []
    assert [kind == "full_attention" for kind in kinds] == [kind == FULL for kind in layer_kinds(found)]


@pytest.mark.parametrize("word", ["layers_block_type", "hybrid_override_pattern"])
def test_layers_of_nemotron_h_are_counted_by_their_kinds(tmp_path, word: str) -> None:
    kinds = ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]
    given = {word: kinds if word == "layers_block_type" else "M-*EM"}
    found = read(tmp_path, {"architectures": ["NemotronHForCausalLM"], "num_key_value_heads": 2, **given})
    assert (found.num_hidden_layers, list(layer_kinds(found, kinds))) == (5, kinds)
    with pytest.raises(ConfigError, match=r"has 5 layer_types, mlp, moe; wanted 5, each linear_attention or"):
        layer_kinds(found)


def test_kinds_of_layers_are_named_in_two_ways_or_counted(tmp_path) -> None:
    named = {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "attention", "mamba", "mamba"]}
    kinds = ("linear_attention", "full_attention", "linear_attention", "linear_attention")
    assert layer_kinds(read(tmp_path, named)) == kinds
    more: list[dict[str, Any]] = [{}, {"full_attention_interval": 3}]
    for given in more:
        wanted = transformers.Qwen3NextConfig(num_hidden_layers=4, **given).layer_types
        found = read(tmp_path, {"architectures": ["Qwen3NextForCausalLM"], "num_attention_heads": 4, **given})
        assert list(layer_kinds(found)) == wanted


PER_LAYER: tuple[tuple[str, dict[str, Any], str, list[Any]], ...] = (
    ("Qwen3ForCausalLM", {"sliding_window": 8}, "layer_types", ["sliding_attention", "full_attention"]),
    ("Qwen3NextForCausalLM", {}, "layer_types", ["linear_attention", "full_attention"]),
    ("GraniteMoeHybridForCausalLM", {}, "layer_types", ["mamba", "attention"]),
    ("Lfm2MoeForCausalLM", {}, "layer_types", ["conv", "full_attention"]),
    ("Glm4MoeForCausalLM", {"head_dim": 12}, "mlp_layer_types", ["dense", "sparse"]),
)
"""Architectures, further required keys, and a key with one entry per layer."""


@pytest.mark.parametrize("count", [3, 5], ids=["one short", "one over"])
@pytest.mark.parametrize(("architecture", "more", "word", "kinds"), PER_LAYER, ids=lambda value: str(value)[:20])
def test_entries_that_are_not_one_for_each_layer_are_refused(
    tmp_path, architecture: str, more: dict[str, Any], word: str, kinds: list[Any], count: int
) -> None:
    """A list that is one entry too long comes from another checkpoint, as one that is too short
    does: reading it would give layers of the wrong kinds without an error."""
    given = {"architectures": [architecture], "num_key_value_heads": 2, **more}
    assert layer_kinds_or_windows(read(tmp_path, {**given, word: kinds * 2}))
    with pytest.raises(ConfigError, match=f"has {count} {word}"):
        layer_kinds_or_windows(read(tmp_path, {**given, word: (kinds * 3)[:count]}))


def layer_kinds_or_windows(config: ModelConfig) -> tuple[Any, ...]:
    """Read the layer kinds or windows as a model with several layer kinds does."""
    has_states = {"mamba", "conv", "linear_attention"} & {*config.words.get("layer_types", ())}
    return layer_kinds(config) if has_states else config.sliding_windows


@pytest.mark.parametrize("end", [0.1, float("inf"), {"__float__": "Infinity"}])
def test_a_time_step_has_the_limits_of_the_file(tmp_path, end: Any) -> None:
    found = read(tmp_path, {"architectures": ["GraniteMoeHybridForCausalLM"], "time_step_limit": [0.01, end]})
    space = mamba2_config(found)
    assert (space.dt_min, space.dt_max) == (0.01, 0.1 if end == 0.1 else float("inf"))
