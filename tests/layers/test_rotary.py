"""Cosines and sines of every kind of rotary embedding, compared with transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sglcore.checkpoint.model_config import ModelConfig, RopeConfig, read_config
from sglcore.checkpoint.rope_config import mrope_axes, rotary_frequencies
from sglcore.core.errors import ConfigError
from sglcore.layers.rotary import cos_sin_cache
from tests.checkpoints import LLAMA3, LONG, llama, rope, save

YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "default": rope("default"),
    "linear": rope("linear", factor=2.5),
    "dynamic": rope("dynamic", factor=2.0),
    "llama3": rope("llama3", **LLAMA3),
    "yarn": rope("yarn", **YARN),
    "yarn-mscale": rope("yarn", **YARN, mscale=0.7, mscale_all_dim=1.3),
    "yarn-mscale-alone": rope("yarn", **YARN, mscale=0.7),
    "yarn-mscale-of-all-dims-alone": rope("yarn", **YARN, mscale_all_dim=1.3),
    "yarn-mscale-alike": rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0),
    "yarn-untruncated": rope("yarn", **YARN, truncate=False, beta_fast=16.0, beta_slow=2.0),
    "yarn-low-base": rope("yarn", factor=4.0, original_max_position_embeddings=400, rope_theta=4.0),
    "longrope": rope("longrope", **LONG),
    "longrope-factor": rope("longrope", **LONG, factor=3.0, attention_factor=1.2),
    "large-base": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
}


@pytest.mark.parametrize("name", CASES)
def test_the_cache_has_the_oracles_cosines_and_sines(tmp_path, name: str) -> None:
    oracle = llama(**CASES[name])
    config = read_config(save(oracle, tmp_path))
    positions = torch.arange(64)[None]
    cos, sin = LlamaRotaryEmbedding(oracle.config)(torch.zeros(1), positions)
    got = cos_sin_cache(config, 64, torch.device("cpu"))
    assert got.dtype == torch.float32
    want = torch.cat((cos[0, :, :6], sin[0, :, :6]), dim=-1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("positions", "name"), [(15, "short"), (16, "short"), (17, "long")])
def test_factors_are_the_long_ones_behind_the_original_length_and_not_at_it(
    tmp_path, positions: int, name: str
) -> None:
    oracle = llama(**CASES["longrope"])
    config = read_config(save(oracle, tmp_path))
    frequencies, scale = rotary_frequencies(config, positions)
    wanted, factor = ROPE_INIT_FUNCTIONS["longrope"](oracle.config, "cpu", seq_len=positions)
    torch.testing.assert_close(torch.from_numpy(frequencies), wanted)
    assert scale == pytest.approx(factor)
    base = 10000.0 ** (torch.arange(0, 12, 2) / 12)
    torch.testing.assert_close(wanted, 1.0 / (torch.tensor(LONG[f"{name}_factor"]) * base))


def with_rope(tmp_path, **changes) -> ModelConfig:
    """Return a configuration with other rotary settings."""
    config = read_config(save(llama(), tmp_path))
    return replace(config, rope=replace(config.rope, **changes))


def test_a_part_of_a_head_is_rotated(tmp_path) -> None:
    config = with_rope(tmp_path, partial=0.5)
    frequencies = 10000.0 ** (-torch.arange(0, 6, 2).float() / 6)
    got = cos_sin_cache(config, 8, torch.device("cpu"))
    torch.testing.assert_close(got[:, :3], torch.outer(torch.arange(8.0), frequencies).cos())


def test_kinds_and_numbers_that_are_not_known_are_errors(tmp_path) -> None:
    with pytest.raises(ConfigError, match="rope_type 'spiral' is not supported; wanted one of default, dynamic"):
        cos_sin_cache(with_rope(tmp_path, kind="spiral"), 8, torch.device("cpu"))
    with pytest.raises(ConfigError, match="the rope parameters of 'linear' have no 'factor'"):
        cos_sin_cache(with_rope(tmp_path, kind="linear"), 8, torch.device("cpu"))


def test_the_cache_of_a_short_context_is_the_start_of_a_longer_one(tmp_path) -> None:
    for kind in ("default", "dynamic", "llama3", "yarn"):
        scaling = {"default": {}, "dynamic": {"factor": 2.0}}.get(kind, {**LLAMA3, **YARN})
        config = with_rope(tmp_path, kind=kind, scaling=scaling)
        short, long = (cos_sin_cache(config, size, torch.device("cpu")) for size in (16, 64))
        assert torch.equal(short, long[:16]), kind


def test_axes_of_qwen_3_vl_take_turns_though_the_file_does_not_say_so(tmp_path) -> None:
    config = with_rope(tmp_path, scaling={"mrope_section": [2, 2, 2]})
    axes = mrope_axes(replace(config, architecture="Qwen3VLForConditionalGeneration"))
    assert axes is not None and axes.tolist() == [0, 1, 2, 0, 1, 2]
    axes = mrope_axes(replace(config, architecture="Qwen2_5_VLForConditionalGeneration"))
    assert axes is not None and axes.tolist() == [0, 0, 1, 1, 2, 2]


def test_rope_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        RopeConfig(1e4, "default", 1.0, 64, {}).theta = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_kind_that_turns_a_part_of_a_head_by_nothing_has_the_oracles_cosines_and_sines(tmp_path, kind: str) -> None:
    sizes: Any = {
        "hidden_size": 24,
        "head_dim": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "global_head_dim": 16,
    }
    own: Any = Gemma4TextConfig(**sizes, layer_types=["sliding_attention", "full_attention"])
    cos, sin = Gemma4TextRotaryEmbedding(own)(torch.zeros(1), torch.arange(64)[None], kind)
    given = own.rope_parameters[kind]
    partial, size = given.get("partial_rotary_factor", 1.0), 16 if kind == "full_attention" else 12
    config = with_rope(tmp_path, kind=given["rope_type"], theta=given["rope_theta"], partial=partial)
    got = cos_sin_cache(replace(config, head_dim=size), 64, torch.device("cpu"))
    want = torch.cat((cos[0, :, : size // 2], sin[0, :, : size // 2]), dim=-1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
