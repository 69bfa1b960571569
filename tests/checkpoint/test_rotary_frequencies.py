"""The frequencies of every kind of rotary embedding, and the scale of latent attention's scores,
compared with transformers for many numbers of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from sglcore.checkpoint.latent_config import FULL, SHARED, LatentConfig, latent_config, with_indexer
from sglcore.checkpoint.model_config import ModelConfig, config_of
from sglcore.checkpoint.rope_config import KINDS, halves_first, mrope_axes, rotary_dim, rotary_frequencies
from sglcore.core.errors import ConfigError

SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}


def read(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    """Read a configuration; only its path is not there."""
    return config_of(Path("nowhere"), {**SIZES, "architectures": [architecture], **changes})


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0 + n / 10 for n in range(12)], "long_factor": [2.0 + n for n in range(12)]}
SCALED: tuple[tuple[str, Mapping[str, Any]], ...] = (
    *(("linear", {"factor": factor}) for factor in (0.5, 1.0, 8.0)),
    *(("llama3", {**LLAMA3, "factor": factor}) for factor in (1.0, 8.0)),
    ("llama3", {**LLAMA3, "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0}),
    *(("yarn", {**YARN, "factor": factor}) for factor in (0.5, 1.0, 1.5, 4.0)),
    *(("yarn", {**YARN, "factor": factor, "mscale": 0.7, "mscale_all_dim": 1.3}) for factor in (0.5, 1.0, 4.0)),
    ("yarn", {**YARN, "factor": 4.0, "attention_factor": 0.5}),
    ("yarn", {**YARN, "factor": 4.0, "attention_factor": None, "mscale": 0.7}),
    ("yarn", {**YARN, "factor": 4.0, "mscale_all_dim": 1.3}),
    ("yarn", {**YARN, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0}),
    ("yarn", {**YARN, "factor": 4.0, "beta_fast": 0, "beta_slow": 0}),
    ("yarn", {**YARN, "factor": 4.0, "beta_fast": None, "beta_slow": 4}),
    ("yarn", {**YARN, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5}),
    ("yarn", {**YARN, "factor": 4.0, "truncate": False}),
    ("yarn", {**YARN, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 2.0, "truncate": False}),
    *(("longrope", {**LONG, **YARN, "factor": factor}) for factor in (0.5, 1.0, 4.0)),
    ("longrope", {**LONG, **YARN, "factor": 4.0, "attention_factor": 0.5}),
    ("longrope", {**LONG, **YARN, "factor": 4.0, "attention_factor": None}),
)


@pytest.mark.parametrize(("kind", "numbers"), SCALED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("theta", [100.0, 1e6])
def test_frequencies_and_their_factor_are_the_librarys(kind: str, numbers: Mapping[str, Any], theta: float) -> None:
    given = {"rope_type": kind, "rope_theta": theta, **numbers}
    oracle = transformers.LlamaConfig(**SIZES, rope_parameters=given)
    for positions in (64, 256):
        wanted, factor = ROPE_INIT_FUNCTIONS[kind](oracle, torch.device("cpu"), seq_len=positions)
        found, scale = rotary_frequencies(read(rope_parameters=given), positions)
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-6, atol=0)
        assert scale == pytest.approx(factor)


def test_every_scaled_kind_is_compared() -> None:
    assert {kind for kind, _ in SCALED} == KINDS.keys() - {"default", "dynamic", "proportional"}


@pytest.mark.parametrize("partial", [0.0, 0.25, 0.35, 0.5, 1.0])
@pytest.mark.parametrize("factor", [None, 1.0, 4.0])
def test_a_proportional_part_of_the_frequencies_is_the_librarys(partial: float, factor: float | None) -> None:
    given: dict[str, Any] = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": partial}
    given |= {} if factor is None else {"factor": factor}
    oracle = transformers.LlamaConfig(**SIZES, rope_parameters=given)
    wanted, _ = ROPE_INIT_FUNCTIONS["proportional"](oracle, torch.device("cpu"))
    config = read(rope_parameters=given)
    found, scale = rotary_frequencies(config, 64)
    assert rotary_dim(config) == SIZES["head_dim"] and scale == 1.0
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-6, atol=0)


def test_a_proportional_part_may_be_of_an_odd_number_of_elements() -> None:
    given = {"rope_type": "proportional", "partial_rotary_factor": 0.4}
    assert int(0.4 * SIZES["head_dim"]) % 2 == 1
    assert rotary_dim(read(rope_parameters=given)) == SIZES["head_dim"]
    with pytest.raises(ConfigError, match="rotates 9 elements of a head; wanted an even number"):
        read(partial_rotary_factor=0.4)


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_dynamic_frequencies_are_those_of_the_original_length(factor: float) -> None:
    given = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": factor}
    oracle = transformers.LlamaConfig(**SIZES, rope_parameters=given)
    wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](oracle, torch.device("cpu"), seq_len=SIZES["max_position_embeddings"])
    found, scale = rotary_frequencies(read(rope_parameters=given), 256)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-6, atol=0)
    assert scale == 1.0


def test_an_unknown_kind_of_rotary_embedding_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="rope_type 'spiral' is not supported; wanted one of .*llama3.*yarn"):
        rotary_frequencies(read(rope_parameters={"rope_type": "spiral"}), 64)


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
@pytest.mark.parametrize("original", [64, 256])
def test_without_a_factor_the_two_lengths_give_it(kind: str, original: int) -> None:
    numbers = {"rope_type": kind, "original_max_position_embeddings": original, **(LONG if kind == "longrope" else {})}
    found, scale = rotary_frequencies(read(rope_parameters=numbers), 256)
    wanted, factor = rotary_frequencies(read(rope_parameters={**numbers, "factor": 256 / original}), 256)
    assert found.tolist() == wanted.tolist() and scale == factor


@pytest.mark.parametrize(("partial", "rotated"), [(0.0, 0), (0.25, 6), (0.35, 8), (0.5, 12), (1.0, 24)])
def test_a_head_is_rotated_as_far_as_its_part_says(partial: float, rotated: int) -> None:
    config = read(partial_rotary_factor=partial)
    found, scale = rotary_frequencies(config, 64)
    assert rotary_dim(config) == rotated and scale == 1.0
    np.testing.assert_allclose(found, [10000.0 ** (-n / rotated) for n in range(0, rotated, 2)], rtol=1e-6)


@pytest.mark.parametrize(("partial", "rotated"), [(-0.25, -6), (1.25, 30), (2.0, 48)])
def test_a_part_that_is_no_part_is_refused(partial: float, rotated: int) -> None:
    wanted = rf"partial_rotary_factor is {partial}, {rotated} elements of a head are rotated; wanted 0 to 24"
    with pytest.raises(ConfigError, match=wanted):
        rotary_frequencies(read(partial_rotary_factor=partial), 64)


@pytest.mark.parametrize("count", [11, 13])
@pytest.mark.parametrize(("positions", "name"), [(64, "short_factor"), (65, "long_factor")])
def test_factors_that_are_not_one_for_each_frequency_are_refused(count: int, positions: int, name: str) -> None:
    given = {"rope_type": "longrope", **YARN, **LONG, name: [1.0] * count}
    with pytest.raises(ConfigError, match=f"{name} has {count} numbers; wanted 12, one for each frequency"):
        rotary_frequencies(read(rope_parameters=given), positions)
    rotary_frequencies(read(rope_parameters=given), 129 - positions)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("linear", "factor"), *(("llama3", name) for name in ("factor", "low_freq_factor", "high_freq_factor"))],
)
def test_a_number_that_a_kind_lacks_is_named(kind: str, name: str) -> None:
    given = {"rope_type": kind, "factor": 8.0, **LLAMA3}
    del given[name]
    with pytest.raises(ConfigError, match=f"the rope parameters of '{kind}' have no '{name}'; wanted a number"):
        rotary_frequencies(read(rope_parameters=given), 64)


@pytest.mark.parametrize(
    ("heads", "size", "turned", "wanted"),
    [
        (1, 4, 4, [0, 2, 1, 3]),
        (1, 6, 4, [0, 2, 1, 3, 4, 5]),
        (2, 6, 4, [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]),
        (2, 3, 0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_pairs_of_neighbours_are_moved_half_of_the_rotated_rows_apart(
    heads: int, size: int, turned: int, wanted: list[int]
) -> None:
    assert halves_first(heads, size, turned).tolist() == wanted


SECTIONS = ([4, 4, 4], [6, 4, 2], [8, 2, 2], [4, 4, 3])


@pytest.mark.parametrize("sections", SECTIONS)
@pytest.mark.parametrize("architecture", ["Qwen3VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration"])
def test_axes_that_take_turns_are_the_librarys(architecture: str, sections: list[int]) -> None:
    given = {"rope_type": "default", "mrope_section": sections, "partial_rotary_factor": 1.0}
    oracle: Any = Qwen3VLTextRotaryEmbedding(transformers.Qwen3VLTextConfig(**SIZES, rope_parameters=given))
    own = oracle.recomposition_frequencies(torch.arange(3.0)[:, None, None, None].repeat(1, 1, 1, 12))[0, 0, :12]
    for found in (
        mrope_axes(read(architecture, head_dim=24, rope_parameters=given)),
        mrope_axes(read(head_dim=24, rope_parameters={**given, "mrope_interleaved": True})),
    ):
        assert found is not None and found.tolist() == own.tolist()


def test_axes_in_three_sections_fill_all_frequencies() -> None:
    given = {"rope_type": "mrope", "mrope_section": [6, 4, 2]}
    for config in (
        read(rope_parameters=given),
        read("Qwen3VLForConditionalGeneration", head_dim=24, rope_parameters={**given, "mrope_interleaved": False}),
    ):
        axes = mrope_axes(config)
        assert axes is not None and axes.dtype == np.int32 and axes.tolist() == [0] * 6 + [1] * 4 + [2] * 2
    for sections in ([6, 4, 1], [6, 4, 3]):
        with pytest.raises(ConfigError, match=rf"mrope_section is \[6, 4, {sections[2]}\]; wanted a sum of 12 freq"):
            mrope_axes(read(rope_parameters={**given, "mrope_section": sections}))
    assert mrope_axes(read()) is None


LATENT: dict[str, Any] = {**SIZES, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16}


def latent(**changes: Any) -> LatentConfig:
    """Read the configuration of latent attention."""
    words = {**LATENT, **changes}
    del words["head_dim"]
    return latent_config(config_of(Path("nowhere"), {**words, "architectures": ["DeepseekV3ForCausalLM"]}), {})


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
@pytest.mark.parametrize("weight", [None, 0, 0.7, 1.0])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 40.0])
def test_scores_of_latent_attention_are_scaled_as_by_the_library(
    kind: str, weight: float | None, factor: float
) -> None:
    given = {"rope_type": kind, "rope_theta": 1e4, "factor": factor, **YARN}
    given |= {} if weight is None else {"mscale_all_dim": weight}
    found = latent(rope_parameters=given)
    assert (found.query_dim, found.width) == (36, 512 + 16)
    assert found.scaling == pytest.approx(yarn_apply_mscale(given, 36**-0.5))


def test_scores_are_not_scaled_by_an_extension_that_extends_nothing() -> None:
    given = {"rope_type": "yarn", "mscale_all_dim": 1.0, "original_max_position_embeddings": 256}
    assert latent(rope_parameters=given).scaling == 36**-0.5


def indexed(**changes: Any) -> LatentConfig:
    """Read the configuration of latent attention with an indexer."""
    words = {**LATENT, "num_hidden_layers": 5, "architectures": ["GlmMoeDsaForCausalLM"], **changes}
    del words["head_dim"]
    config = config_of(Path("nowhere"), words)
    return with_indexer(config, latent_config(config, {}), is_paired=True)


@pytest.mark.parametrize("first", [0, 1, 2, 4, 9])
@pytest.mark.parametrize("every", [0, 1, 2, 4])
def test_layers_that_share_a_choice_are_the_librarys_for_every_period(every: int, first: int) -> None:
    words: dict[str, Any] = {"index_topk_freq": every, "index_skip_topk_offset": first}
    own: Any = transformers.GlmMoeDsaConfig(num_hidden_layers=5, **{**words, "index_topk_freq": max(every, 1)})
    kinds = own.indexer_types
    if kinds[0] != FULL:
        with pytest.raises(ConfigError, match="wanted 5, each 'full' or 'shared', the first 'full'"):
            indexed(**words)
    else:
        assert list(indexed(**words).indexers) == kinds


def test_an_indexer_that_does_not_fit_is_refused() -> None:
    assert indexed(index_head_dim=16).index_dim == 16
    with pytest.raises(ConfigError, match="index_head_dim = 15; wanted qk_rope_head_dim, 16, at least"):
        indexed(index_head_dim=15)
    for pattern in ("FFFF", "FFFFFF", "SFFFF", "FFFFX"):
        with pytest.raises(ConfigError, match="wanted 5, each 'full' or 'shared', the first 'full'"):
            indexed(index_topk_pattern=pattern)
    found = indexed(index_topk_pattern="FSSFS", index_topk=7, index_n_heads=3)
    assert found.indexers == (FULL, SHARED, SHARED, FULL, SHARED)
    assert (found.top_k, found.index_heads, found.is_paired) == (7, 3, True)
