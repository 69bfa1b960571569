"""A value of the wrong type in a `config.json` gives a one-line error that names the key, in every
reader."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sglcore.checkpoint import (
    compressed_config,
    config_synonyms,
    encoder_config,
    latent_config,
    model_config,
    ngram_config,
    pooling_config,
    recurrent_config,
    rope_config,
)
from sglcore.checkpoint.config_synonyms import WORDS
from sglcore.checkpoint.config_types import KINDS
from sglcore.checkpoint.model_config import ModelConfig, config_of, read_config
from sglcore.checkpoint.parallel import tensor_parallel
from sglcore.checkpoint.parallel.tensor_parallel import constraints
from sglcore.core.errors import ConfigError, SglcoreError
from sglcore.core.ledger import DecisionLedger
from sglcore.models.architecture_registry import ARCHITECTURES
from sglcore.models.implementation import choose_implementation
from tests.models.transformers_cases import sizes_of

BASE: Mapping[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
WRONG: tuple[Any, ...] = (None, 0, -1, 3, 2.5, 1e30, "x", [], ["a"], [1], {}, {"a": 1}, True)


def with_indexer(found: ModelConfig) -> object:
    return latent_config.with_indexer(found, latent_config.latent_config(found, {}), True)


def mixers(found: ModelConfig) -> object:
    kinds = recurrent_config.layer_kinds(
        found, (recurrent_config.LINEAR, recurrent_config.FULL, recurrent_config.MLP, recurrent_config.MOE)
    )
    return kinds, recurrent_config.mamba2_config(found)


def delta_net(found: ModelConfig) -> object:
    return recurrent_config.layer_kinds(found), recurrent_config.delta_net_config(found)


V4 = {"compress_ratios": [0, 4, 128, 0], "n_hash_layers": 1, "num_key_value_heads": 1}
READERS: Mapping[str, tuple[Callable[[ModelConfig], object], Mapping[str, Any]]] = {
    "LlamaForCausalLM": (lambda found: None, {}),
    "Gemma3ForCausalLM": (lambda found: None, {}),
    "Qwen2MoeForCausalLM": (lambda found: None, {}),
    "Qwen3NextForCausalLM": (delta_net, {}),
    "DeepseekV2ForCausalLM": (lambda found: latent_config.latent_config(found, {}), {}),
    "DeepseekV32ForCausalLM": (with_indexer, {}),
    "DeepseekV4ForCausalLM": (compressed_config.compressed_config, V4),
    "Lfm2ForCausalLM": (recurrent_config.layer_kinds, {}),
    "NemotronHForCausalLM": (mixers, {"layers_block_type": ["mamba", "attention", "moe", "mlp"]}),
    "Qwen3VLForConditionalGeneration": (lambda found: None, {}),
    "ModernBertForSequenceClassification": (lambda found: None, {}),
    "XLMRobertaForSequenceClassification": (lambda found: None, {}),
}
"""The reader of each architecture's own configuration keys, and the keys that it requires."""


def read(folder: Path, architecture: str, changes: Mapping[str, Any]) -> None:
    """Read everything from a configuration that is read before the weights."""
    reader, own = READERS[architecture]
    found = config_of(folder, {**BASE, **own, "architectures": [architecture], **changes}, ARCHITECTURES)
    rope_config.rotary_frequencies(found, 64)
    for each in (rope_config.mrope_axes, constraints, reader):
        each(found)


def names() -> list[str]:
    return sorted({*KINDS, *itertools.chain(*WORDS.values())})


@pytest.mark.parametrize("architecture", READERS)
def test_no_value_of_any_name_is_anything_but_read_or_refused_in_one_line(architecture: str, tmp_path: Path) -> None:
    for name, value in itertools.product(names(), WRONG):
        try:
            read(tmp_path, architecture, {name: value})
        except SglcoreError as error:
            assert "\n" not in str(error), (name, value)


SCALED = {"factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("kind", ["yarn", "longrope", "llama3", "linear"])
def test_no_number_of_a_rotary_embedding_is_anything_but_read_or_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    lists = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6} if kind == "longrope" else {}
    whole = {"rope_type": kind, **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **lists}
    for name, value in itertools.product((*whole, "beta_fast", "mscale", "mrope_section"), WRONG):
        try:
            read(tmp_path, "LlamaForCausalLM", {"rope_scaling": {**whole, name: value}})
        except SglcoreError as error:
            assert "\n" not in str(error), (name, value)


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_null_for_the_factor_of_a_rotary_embedding_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    whole = {"rope_type": kind, "factor": None, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    with pytest.raises(ConfigError, match=f"the rope parameters of '{kind}' have no 'factor'; wanted a number"):
        read(tmp_path, "LlamaForCausalLM", {"rope_scaling": whole})


def test_null_switches_truncation_off_as_in_the_library(tmp_path: Path) -> None:
    raw = {**BASE, "architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "yarn", **SCALED}}
    plain, off = (
        config_of(tmp_path, {**raw, "rope_scaling": {**raw["rope_scaling"], **more}})
        for more in ({}, {"truncate": None})
    )
    assert plain.rope.scaling.get("truncate", True) and off.rope.scaling["truncate"] is False


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind[0] == "a whole number above zero"])
def test_a_count_of_none_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "architectures": ["LlamaForCausalLM"], name: 0}))
    if name == "qk_rope_head_dim":  # a key of DeepSeek-V4, which reports it itself
        return
    with pytest.raises(ConfigError, match=f"has {name} = 0; wanted a whole number above zero"):
        read_config(tmp_path)


COUNTS = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def test_what_every_model_has_some_of_is_counted_from_one() -> None:
    assert {KINDS[name][0] for name in (*COUNTS, "max_position_embeddings")} == {"a whole number above zero"}


COUNTED = """num_experts_per_tok head_dim intermediate_size first_k_dense_replace num_experts num_local_experts
    n_routed_experts n_shared_experts moe_intermediate_size shared_intermediate_size local_attention max_window_layers
    shared_expert_intermediate_size num_labels num_hash_layers num_nextn_predict_layers index_topk_freq
    index_skip_topk_offset"""
"""Numbers of which a model may have none."""


@pytest.mark.parametrize("name", COUNTED.split())
def test_what_a_model_may_have_none_of_is_counted_from_zero(name: str, tmp_path: Path) -> None:
    assert all(KINDS[name][1](value) for value in (0, 1)) and not any(KINDS[name][1](value) for value in (-1, 0.0))
    given = {**BASE, "architectures": ["LlamaForCausalLM"], name: -1}
    with pytest.raises(ConfigError, match=f"has {name} = -1; wanted a whole number; download"):
        config_of(tmp_path, given)


OWN = {"added_tokens", "block_rope", "first_position", "compression_config", "quantization_config", "pad_token_id"}
OWN |= {"dense_context", "eos_token_id"}
"""Names that are checked by their readers, or that do not come from a checkpoint."""
MAPPINGS = re.compile(r"(config\.|^)(words|raw|values|scaling|rope\.scaling)$")


def asked(source: str) -> Iterator[str]:
    """Yield the keys that a source text reads from a configuration."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(value=where, attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]
            ):
                pass
            case ast.Subscript(value=where, slice=ast.Constant(value=str(name))):
                pass
            case _:
                continue
        if MAPPINGS.search(ast.unparse(where)):
            yield name


@pytest.mark.parametrize(
    "module",
    [
        compressed_config,
        model_config,
        encoder_config,
        latent_config,
        ngram_config,
        recurrent_config,
        config_synonyms,
        rope_config,
        tensor_parallel,
        pooling_config,
    ],
)
def test_every_name_that_is_asked_for_has_a_kind(module: Any) -> None:
    own = {*KINDS, *itertools.chain(*WORDS.values()), *OWN}
    modes = {*pooling_config.MODES.values(), "pooling_mode", "include_prompt"}  # of a pooling file
    found = set(asked(Path(module.__file__).read_text(encoding="utf-8")))
    assert found - own - (modes if module is pooling_config else set()) == set()


def test_null_in_words_of_encoders_is_refused_by_its_name(tmp_path: Path) -> None:
    modern, roberta = "ModernBertForSequenceClassification", "XLMRobertaForSequenceClassification"
    for architecture, name in (
        (modern, "local_attention"),
        (modern, "global_attn_every_n_layers"),
        (modern, "num_hidden_layers"),
        (roberta, "pad_token_id"),
    ):
        with pytest.raises(ConfigError, match=f"config.json has {name} = None; wanted a whole number"):
            read(tmp_path, architecture, {name: None})


def test_labels_that_are_null_are_two_as_in_the_library(tmp_path: Path) -> None:
    found = pooling_config.read_pooling(tmp_path, "BertForSequenceClassification", {"num_labels": None})
    assert found is not None and found.labels == 2
    with pytest.raises(ConfigError, match="classifier_pooling = 'median'; wanted cls or mean"):
        pooling_config.read_pooling(tmp_path, "ModernBertForSequenceClassification", {"classifier_pooling": "median"})


BY_CLASS = ("bloom", "dbrx", "deepseek_v3", "exaone4", "falcon_mamba", "gemma3_text", "gpt2", "mpt", "opt")
"""Model types that run with transformers' classes; each has its own names for the sizes."""
MORE = (
    "architectures",
    "id2label",
    "max_seq_len",
    "num_nextn_predict_layers",
    "quantization_config",
    "rope_parameters",
)


def of_class(folder: Path, kind: str) -> dict[str, Any]:
    """Save a small configuration of a type with transformers, and return the keys that the type
    defines itself."""
    own = CONFIG_MAPPING[kind]().to_dict()
    model_config = CONFIG_MAPPING[kind](**sizes_of(kind))
    model_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    model_config.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in raw.items() if name in own}


def by_class(folder: Path, raw: Mapping[str, Any]) -> ModelConfig:
    """Read the configuration for transformers' own model class."""
    (folder / "config.json").write_text(json.dumps(raw))
    return choose_implementation("transformers", folder, DecisionLedger())[0]


@pytest.mark.parametrize("kind", BY_CLASS)
def test_no_value_of_what_runs_by_a_class_is_anything_but_read_or_refused_in_one_line(
    kind: str, tmp_path: Path
) -> None:
    raw = of_class(tmp_path, kind)
    for name, value in itertools.product({**raw, **dict.fromkeys(MORE)}, (None, "x", -1, [], {"a": 1})):
        try:
            found = by_class(tmp_path, {**raw, name: value})
        except SglcoreError as error:
            assert "\n" not in str(error), (name, value)
        else:
            assert min(found.context_length, found.hidden_size, found.vocab_size, found.num_hidden_layers) > 0, (
                name,
                value,
            )


@pytest.mark.parametrize(
    ("kind", "name"),
    [("dbrx", "max_seq_len"), ("mpt", "max_seq_len"), ("gpt2", "n_positions"), ("exaone4", "hidden_size")],
)
def test_null_for_a_number_that_no_model_is_without_is_refused_by_the_types_own_name(
    kind: str, name: str, tmp_path: Path
) -> None:
    raw = of_class(tmp_path, kind)
    with pytest.raises(ConfigError, match=rf"{name}\b.*None|transformers refuses .*{name}"):
        by_class(tmp_path, {**raw, name: None})
