"""What a file leaves out, compared with the defaults of transformers' configuration classes:
encoders, language parts of vision models, layers with a state, and compressed attention."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from sglcore.checkpoint.compressed_config import compressed_config
from sglcore.checkpoint.config_defaults import DEFAULTS
from sglcore.checkpoint.encoder_config import ENCODERS, language_model
from sglcore.checkpoint.model_config import ModelConfig, config_of
from sglcore.checkpoint.recurrent_config import DeltaNetConfig, Mamba2Config, delta_net_config, mamba2_config
from sglcore.core.errors import ConfigError
from sglcore.models.architecture_registry import ARCHITECTURES

SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 72,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "vocab_size": 97,
    "max_position_embeddings": 8192,
}


def read(architecture: str, **changes: Any) -> ModelConfig:
    """Read a configuration; only its path is not there."""
    return config_of(Path("nowhere"), {**SIZES, "architectures": [architecture], **changes}, ARCHITECTURES)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"num_hidden_layers": 7, "global_attn_every_n_layers": 2},
        {"global_attn_every_n_layers": 1},
        {"local_attention": 33},
        {"local_attention": 2},
        {"global_rope_theta": 2e4, "local_rope_theta": 3e3},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", sorted(name for name in ENCODERS if name.startswith("ModernBert")))
def test_windows_of_a_modern_encoder_are_the_librarys(architecture: str, given: dict[str, Any]) -> None:
    wanted: Any = transformers.ModernBertConfig(**{**SIZES, **given})
    reach, ropes = wanted.sliding_window + 1, wanted.rope_parameters
    found = read(architecture, **given)
    windows = [reach if kind == "sliding_attention" else None for kind in wanted.layer_types]
    assert list(found.sliding_windows) == windows
    assert found.rope.theta == ropes["full_attention"]["rope_theta"]
    assert found.local_rope is not None and found.local_rope.theta == ropes["sliding_attention"]["rope_theta"]
    assert found.hidden_act == wanted.hidden_activation


@pytest.mark.parametrize("value", [True, 1.0, "1", [1], None])
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("RobertaModel", "pad_token_id"),
        ("ModernBertModel", "local_attention"),
        ("ModernBertModel", "global_attn_every_n_layers"),
    ],
)
def test_a_number_of_an_encoder_is_a_whole_one(architecture: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"has {re.escape(f'{name} = {value!r}')}; wanted a whole number"):
        read(architecture, **{name: value})


@pytest.mark.parametrize("architecture", sorted(name for name in ENCODERS if "Roberta" in name))
@pytest.mark.parametrize("given", [{}, {"pad_token_id": 0}, {"pad_token_id": 5}], ids=str)
def test_positions_of_a_roberta_begin_after_the_padding_tokens(architecture: str, given: dict[str, Any]) -> None:
    oracle: Any = transformers.RobertaConfig(**given)
    first = oracle.pad_token_id + 1
    found = read(architecture, **given)
    assert (found.first_position, found.context_length) == (first, SIZES["max_position_embeddings"] - first)


def test_other_encoders_begin_at_position_zero_and_have_no_windows() -> None:
    for architecture in sorted(name for name in ENCODERS if name.startswith("Bert")):
        found = read(architecture, pad_token_id=7, local_attention=4)
        assert (found.first_position, set(found.sliding_windows), found.local_rope) == (0, {None}, None)


@pytest.mark.parametrize("architecture", sorted(ENCODERS))
def test_encoders_have_the_librarys_activation_unless_the_file_names_one(architecture: str) -> None:
    wanted = getattr(transformers, architecture).config_class().to_dict()
    name = "hidden_activation" if "hidden_activation" in wanted else "hidden_act"
    assert read(architecture).hidden_act == wanted[name]
    assert read(architecture, **{name: "relu"}).hidden_act == "relu"


@pytest.mark.parametrize(
    ("architecture", "wanted"),
    [
        ("LlamaForSequenceClassification", "LlamaForCausalLM"),
        ("Qwen3Model", "Qwen3ForCausalLM"),
        ("Qwen3ForCausalLM", "Qwen3ForCausalLM"),
        ("BertModel", "BertModel"),
        ("BertForSequenceClassification", "BertForSequenceClassification"),
    ],
)
def test_a_decoder_without_its_output_layer_has_the_defaults_of_the_whole(architecture: str, wanted: str) -> None:
    assert language_model(architecture) == wanted


@pytest.mark.parametrize("end", ["Model", "ForSequenceClassification"])
def test_a_part_of_a_decoder_reads_as_the_whole(end: str) -> None:
    for name in ("Mistral", "Qwen3"):
        part, whole = read(f"{name}{end}", num_key_value_heads=8), read(f"{name}ForCausalLM", num_key_value_heads=8)
        assert (part.head_dim, part.sliding_windows) == (whole.head_dim, whole.sliding_windows)


LANGUAGE_PARTS: dict[str, Callable[..., Any]] = {
    "Qwen2_5_VLForConditionalGeneration": lambda **given: transformers.Qwen2_5_VLConfig(text_config=given).text_config,
    "Qwen3VLForConditionalGeneration": transformers.Qwen3VLTextConfig,
    "Qwen3_5ForConditionalGeneration": Qwen3_5TextConfig,
    "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeTextConfig,
    "Qwen4ExpForConditionalGeneration": transformers.Qwen4ExpTextConfig,
}


def test_every_architecture_with_a_language_part_is_compared() -> None:
    assert {name for name in ARCHITECTURES if "ForConditional" in name} == LANGUAGE_PARTS.keys()


@pytest.mark.parametrize("architecture", LANGUAGE_PARTS)
def test_a_language_part_is_completed_as_by_the_library(architecture: str) -> None:
    given = {**SIZES, "hidden_size": 4096, "num_attention_heads": 32}
    oracle = LANGUAGE_PARTS[architecture](**given)
    wanted, rope = oracle.to_dict(), oracle.rope_parameters
    above = read(architecture, **given)
    below = config_of(above.path, {"architectures": [architecture], "text_config": given})
    for found in (below, above):
        for name in DEFAULTS[architecture].keys() & wanted.keys() - {"intermediate_size"}:
            assert found.words[name] == wanted[name], name
        for name in ("num_key_value_heads", "rms_norm_eps", "hidden_act"):
            assert getattr(found, name) == wanted[name], name
        assert (found.rope.theta, found.rope.kind) == (rope["rope_theta"], rope["rope_type"])
        assert (found.rope.partial, found.head_dim) == (rope.get("partial_rotary_factor", 1.0), head_dim(oracle))
        assert (found.attention_bias, found.mlp_bias) == (wanted.get("attention_bias", False), False)
        assert (found.moe and found.moe.num_experts) == wanted.get("num_experts")


def head_dim(oracle: Any) -> int:
    """The size of a head, which some configurations compute."""
    return oracle.to_dict().get("head_dim") or oracle.hidden_size // oracle.num_attention_heads


@pytest.mark.parametrize("layers", [79, 80, 81, 82])
@pytest.mark.parametrize("first", [None, 2])
def test_layers_with_a_window_of_a_language_part_are_the_librarys(layers: int, first: int | None) -> None:
    given = {**SIZES, "num_hidden_layers": layers, "use_sliding_window": True, "sliding_window": 6}
    given |= {} if first is None else {"max_window_layers": first}
    oracle: Any = transformers.Qwen2_5_VLConfig(text_config=given).text_config
    found = read("Qwen2_5_VLForConditionalGeneration", **given)
    assert found.sliding_windows == tuple(6 if kind == "sliding_attention" else None for kind in oracle.layer_types)


@pytest.mark.parametrize(
    ("architecture", "make"),
    [
        ("Qwen3NextForCausalLM", transformers.Qwen3NextConfig),
        ("Qwen3_5ForCausalLM", Qwen3_5TextConfig),
        ("Qwen3_5MoeForCausalLM", Qwen3_5MoeTextConfig),
        ("Qwen4ExpForCausalLM", transformers.Qwen4ExpTextConfig),
    ],
)
def test_heads_of_the_delta_rule_are_the_librarys(architecture: str, make: Callable[[], Any]) -> None:
    wanted = make()
    found = delta_net_config(read(architecture))
    assert found == DeltaNetConfig(
        wanted.linear_num_key_heads,
        wanted.linear_num_value_heads,
        wanted.linear_key_head_dim,
        wanted.linear_value_head_dim,
        wanted.linear_conv_kernel_dim,
    )
    given = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8}
    given |= {"linear_value_head_dim": 4, "linear_conv_kernel_dim": 3}
    found = delta_net_config(read(architecture, **given))
    assert found == DeltaNetConfig(2, 6, 8, 4, 3) and (found.keys, found.values) == (16, 24)


def test_layers_of_mamba_are_the_librarys() -> None:
    granite: Any = transformers.GraniteMoeHybridConfig(**SIZES)
    assert mamba2_config(read("GraniteMoeHybridForCausalLM")) == Mamba2Config(
        heads=granite.mamba_n_heads,
        head_dim=granite.mamba_d_head,
        groups=granite.mamba_n_groups,
        width=granite.mamba_d_state,
        taps=granite.mamba_d_conv,
        conv_bias=granite.mamba_conv_bias,
        proj_bias=granite.mamba_proj_bias,
        dt_min=granite.time_step_limit[0],
        dt_max=granite.time_step_limit[1],
    )
    nemotron: Any = transformers.NemotronHConfig()
    found = mamba2_config(read("NemotronHForCausalLM"))
    assert found == Mamba2Config(
        heads=nemotron.mamba_num_heads,
        head_dim=nemotron.mamba_head_dim,
        groups=nemotron.n_groups,
        width=nemotron.ssm_state_size,
        taps=nemotron.conv_kernel,
        conv_bias=nemotron.use_conv_bias,
        proj_bias=nemotron.mamba_proj_bias,
        dt_min=nemotron.time_step_limit[0],
        dt_max=nemotron.time_step_limit[1],
    )
    assert (found.inner, found.channels) == (128 * 64, 128 * 64 + 2 * 8 * 128)


def test_layers_of_mamba_read_every_number_of_the_file() -> None:
    given = {"mamba_n_heads": 6, "mamba_d_head": 5, "mamba_n_groups": 3, "mamba_d_state": 7, "mamba_d_conv": 2}
    given |= {"mamba_conv_bias": False, "mamba_proj_bias": True, "time_step_limit": [0.25, 0.5]}
    found = mamba2_config(read("GraniteMoeHybridForCausalLM", **given))
    assert found == Mamba2Config(6, 5, 3, 7, 2, False, True, 0.25, 0.5)


def test_compressed_attention_is_completed_as_by_the_library() -> None:
    wanted: Any = transformers.DeepseekV4Config(num_hidden_layers=5)
    base = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    own = {"layer_types": wanted.layer_types, "mlp_layer_types": wanted.mlp_layer_types}
    found = compressed_config(read("DeepseekV4ForCausalLM", intermediate_size=None, **base | own))
    ropes = (found.main_rope.theta, found.block_rope.theta)
    assert ropes == tuple(wanted.rope_parameters[kind]["rope_theta"] for kind in ("main", "compress"))
    numbers = (found.head_dim, found.rope_dim, found.q_lora_rank, found.groups, found.o_lora_rank, found.window)
    words = ("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window")
    assert numbers == tuple(getattr(wanted, word) for word in words)
    numbers = (found.index_heads, found.index_dim, found.index_topk, found.streams, found.sinkhorn_iters)
    words = ("index_n_heads", "index_head_dim", "index_topk", "hc_mult", "hc_sinkhorn_iters")
    assert numbers == tuple(getattr(wanted, word) for word in words)
    assert (found.hc_eps, found.limit) == (wanted.hc_eps, wanted.swiglu_limit)
    rates = [wanted.compress_rates.get(kind) for kind in wanted.layer_types]
    assert [each and each.ratio for each in found.compressions] == rates
