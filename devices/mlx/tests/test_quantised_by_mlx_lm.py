"""Tests checkpoints written by mlx_lm, quantised and with stacked experts, against mlx_lm's own
forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.model_cases import load, logprobs

pytestmark = pytest.mark.needs("torch")

SIZES = {"hidden_size": 64, "intermediate_size": 96}
HYBRID = {
    **SIZES,
    "mamba_n_groups": 1,
    "shared_intermediate_size": 32,
    "time_step_limit": [0.01, 2.0],
    "position_embedding_type": "rope",
}
"""The part of Granite 4 that mlx_lm supports: one norm group, and rotary embeddings unless
`position_embedding_type` is "nope"."""
LATENT = {**SIZES, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
IDS = tuple(int(token) for token in np.random.default_rng(8).integers(3, 97, 40))


def oracle(name: str) -> Any:
    """Return a transformers model with row lengths divisible by 32, the group size."""
    from tests import checkpoints, latent

    made = {
        "deepseek-v2": lambda: latent.deepseek_v2(**LATENT, moe_intermediate_size=32),
        "deepseek-v3": lambda: latent.deepseek_v3(**LATENT, moe_intermediate_size=32),
        "glm4-moe-lite": lambda: latent.glm4_moe_lite(**LATENT, moe_intermediate_size=32, rms_norm_eps=1e-6),
        "llama": lambda: checkpoints.llama(**SIZES),
        "llama-tied-biases": lambda: checkpoints.llama(**SIZES, tie_word_embeddings=True, attention_bias=True),
        "qwen2": lambda: checkpoints.qwen2(**SIZES),
        "qwen3": lambda: checkpoints.qwen3(**SIZES, head_dim=32),
        "qwen3-moe": lambda: checkpoints.qwen3_moe(**SIZES, head_dim=32, moe_intermediate_size=32, num_experts=6),
        "qwen3-next": lambda: checkpoints.qwen3_next(
            **SIZES, moe_intermediate_size=32, shared_expert_intermediate_size=32, full_attention_interval=2
        ),
        "qwen3.5": lambda: checkpoints.qwen35(**SIZES, full_attention_interval=2),
        "lfm2-moe": lambda: checkpoints.lfm2_moe(**SIZES, moe_intermediate_size=32, full_attn_idxs=[1]),
        "nemotron-h": lambda: checkpoints.nemotron_h(
            **SIZES, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, mamba_proj_bias=False
        ),
        "granite-hybrid": lambda: checkpoints.granite_hybrid(**HYBRID),
        "granite-hybrid-dense": lambda: checkpoints.granite_hybrid(
            **{**HYBRID, "shared_intermediate_size": 96}, num_local_experts=0
        ),
    }
    return made[name]()


def converted(name: str, folder: Path, **form: Any) -> Any:
    """Convert the transformers model with mlx_lm: writes a checkpoint to `folder`, quantised if a
    format is given, and returns mlx_lm's model."""
    from mlx_lm import utils

    from tests import checkpoints

    plain = checkpoints.save(oracle(name), folder / "plain")
    name_as_published(plain / "config.json")
    model, config = utils.load_model(plain)
    if form:
        model, config = utils.quantize_model(model, config, **form)
    utils.save_model(folder / "made", model)
    utils.save_config(config, folder / "made" / "config.json")
    return model


def name_as_published(file: Path) -> None:
    """Rename the settings that transformers has renamed back to the names in published checkpoints,
    which mlx_lm reads."""
    config = json.loads(file.read_text())
    config["model_type"] = config["model_type"].removesuffix("_text")
    if config["model_type"] not in ("qwen3_5", "nemotron_h"):
        rope = config.pop("rope_parameters")
        scaling = None if rope.get("rope_type") == "default" or "kv_lora_rank" not in config else rope
        config |= {**rope, "rope_scaling": scaling and {**scaling, "type": scaling["rope_type"]}}
    if "kv_lora_rank" in config:
        config |= {"scoring_func": "softmax" if config["model_type"] == "deepseek_v2" else "sigmoid"}
    if "mamba_n_heads" in config:
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [names[kind] for kind in config["layer_types"]]
    elif "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    file.write_text(json.dumps(config))


def wanted(model: Any) -> np.ndarray:
    """Return the log-probabilities of mlx_lm's model."""
    logits = model(mx.array([IDS]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def by_name(path: str, module: Any) -> bool | dict[str, Any]:
    """8 bits for v_proj and down_proj, no quantisation of expert gates, 4 bits for the rest."""
    if path.endswith(("v_proj", "down_proj")):
        return {"group_size": 32, "bits": 8}
    return not path.endswith("mlp.gate")


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-tied-biases",
        "qwen2",
        "qwen3",
        "qwen3-moe",
        "qwen3-next",
        "qwen3.5",
        "lfm2-moe",
        "nemotron-h",
        "granite-hybrid",
        "granite-hybrid-dense",
        "deepseek-v2",
        "deepseek-v3",
        "glm4-moe-lite",
    ],
)
def test_a_checkpoint_of_four_bits_gives_mlx_lms_numbers(tmp_path: Path, name: str) -> None:
    theirs = converted(name, tmp_path, group_size=32, bits=4)
    ours = load(tmp_path / "made")
    assert "4-bit, groups of 32" in ours.quantization
    np.testing.assert_allclose(logprobs(ours, IDS), wanted(theirs), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "qwen3-next"])
def test_forms_by_module_give_mlx_lms_numbers(tmp_path: Path, name: str) -> None:
    theirs = converted(name, tmp_path, group_size=32, bits=4, quant_predicate=by_name)
    given = json.loads((tmp_path / "made" / "config.json").read_text())["quantization"]
    assert any(path.endswith("v_proj") for path in given)
    ours = load(tmp_path / "made")
    assert ours.quantization == "4-bit, groups of 32; 8-bit, groups of 32"
    np.testing.assert_allclose(logprobs(ours, IDS), wanted(theirs), rtol=0, atol=1e-3)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_the_other_modes_give_mlx_lms_numbers(tmp_path: Path, mode: str) -> None:
    theirs = converted("qwen3", tmp_path, group_size=None, bits=None, mode=mode)
    np.testing.assert_allclose(logprobs(load(tmp_path / "made"), IDS), wanted(theirs), rtol=0, atol=1e-3)


def test_plain_experts_in_one_tensor_are_those_of_transformers(tmp_path: Path) -> None:
    from tests import checkpoints

    converted("qwen3-moe", tmp_path)
    want = checkpoints.oracle_logprobs(oracle("qwen3-moe"), list(IDS)).numpy()
    np.testing.assert_allclose(logprobs(load(tmp_path / "made"), IDS), want, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logprobs(load(tmp_path / "plain"), IDS), want, rtol=0, atol=1e-4)
