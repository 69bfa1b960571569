"""Sizes of layers: together they are the weights of transformers' models, and each part is counted
with the bytes of its element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglcore.checkpoint.model_config import ModelConfig, read_config
from sglcore.core.errors import ConfigError
from sglcore.engine.layouts.model_shape import LayerShape, shape_of
from tests import checkpoints, latent

CLUSTERS = Path(__file__).resolve().parents[3] / "benchmarks" / "clusters"
MAKERS: dict[str, Callable[..., Any]] = {
    "llama": checkpoints.llama,
    "tied": lambda: checkpoints.llama(tie_word_embeddings=True),
    "one key head": lambda: checkpoints.llama(num_key_value_heads=1),
    "large heads": checkpoints.qwen3,
    "experts": checkpoints.mixtral,
    "small experts": checkpoints.qwen3_moe,
    "shared experts and a dense layer": checkpoints.qwen2_moe,
    "latent": latent.deepseek_v3,
    "latent with whole queries": lambda: latent.deepseek_v3(q_lora_rank=None),
    "several shared experts": latent.deepseek_v2,
}


def weights(model: Any, *parts: str) -> int:
    """The elements of a model's matrices with one of these parts in its name (none: all), but for
    the gate of a shared expert, which gives one number."""
    return sum(
        each.numel()
        for name, each in model.named_parameters()
        if each.dim() > 1 and "shared_expert_gate" not in name and (not parts or any(part in name for part in parts))
    )


def held(layer: LayerShape) -> int:
    return layer.whole + layer.by_heads + layer.by_keys


@pytest.mark.parametrize("name", MAKERS)
def test_a_models_weights_are_those_that_transformers_makes(name: str, tmp_path: Path) -> None:
    model = MAKERS[name]()
    config = read_config(checkpoints.save(model, tmp_path))
    shape = shape_of(config)
    assert shape.parameters == weights(model)
    assert shape.tables == weights(model, "embed_tokens", "lm_head")
    routers = config.moe.num_experts * config.hidden_size * sum(config.moe.layers) if config.moe else 0
    assert sum(map(held, shape.layers)) == weights(model, "self_attn") + routers
    assert sum(layer.expert for layer in shape.layers) * shape.experts == weights(model, ".experts.")
    assert all(layer.num_blocks == bool(layer.block) for layer in shape.layers)
    assert (shape.row_bytes, shape.attention_bytes, shape.block_bytes, shape.expert_bytes) == (4, 4, 4, 4)


@pytest.mark.parametrize("name", ["llama", "one key head", "large heads", "latent"])
def test_what_keys_and_queries_divide_is_what_their_matrices_hold(name: str, tmp_path: Path) -> None:
    """Keys and values are divided by key heads, queries and outputs by heads; a latent row and what
    makes it are on every rank."""
    model = MAKERS[name]()
    config = read_config(checkpoints.save(model, tmp_path))
    layer = shape_of(config).layers[0]
    prefix = "layers.0.self_attn."
    by_heads = ("q_proj", "o_proj", "q_b_proj", "kv_b_proj")
    assert layer.by_heads == weights(model, *(prefix + each for each in by_heads))
    assert layer.by_keys == weights(model, prefix + "k_proj", prefix + "v_proj")
    assert layer.whole == weights(model, prefix + "q_a_proj", prefix + "kv_a_proj")
    heads = config.num_attention_heads
    if name == "latent":
        row = config.words["kv_lora_rank"] + config.words["qk_rope_head_dim"]
        assert (layer.cache_whole, layer.cache_by_keys) == (row, 0)
        assert layer.score_flops == 2 * heads * (row + config.words["kv_lora_rank"])
    else:
        assert (layer.cache_whole, layer.cache_by_keys) == (0, 2 * config.num_key_value_heads * config.head_dim)
        assert layer.score_flops == 2 * heads * 2 * config.head_dim


def test_a_token_uses_as_many_experts_as_its_configuration_says(tmp_path: Path) -> None:
    for maker, experts, chosen in (
        (checkpoints.mixtral, 5, 2),
        (latent.deepseek_v2, 8, 3),
        (checkpoints.llama, 0, 0),
    ):
        shape = shape_of(read_config(checkpoints.save(maker(), tmp_path)))
        assert (shape.experts, shape.chosen) == (experts, chosen)


def test_layers_see_what_their_windows_hold() -> None:
    config = read_config(CLUSTERS / "dense-8b")
    windows = (None, 100, *(None for _ in range(config.num_hidden_layers - 2)))
    whole, windowed, *_ = shape_of(replace(config, sliding_windows=windows)).layers
    assert [whole.seen(length) for length in (0, 99, 101)] == [0, 99, 101]
    assert [windowed.seen(length) for length in (0, 99, 100, 101)] == [0, 99, 100, 100]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_elements_that_are_not_quantized_have_the_bytes_of_the_models_type(dtype: str, size: int) -> None:
    dense, sparse = (read_config(CLUSTERS / name) for name in ("dense-8b", "experts-671b"))
    plain, eight = (shape_of(replace(config, dtype=dtype)) for config in (dense, sparse))
    sizes = [(each.row_bytes, each.attention_bytes, each.block_bytes, each.expert_bytes) for each in (plain, eight)]
    assert sizes == [(size,) * 4, (size, 1, 1, 1)]


def quantized(config: ModelConfig, **given: Any) -> tuple[float, ...]:
    shape = shape_of(replace(config, raw={**config.raw, "quantization_config": given}))
    return shape.row_bytes, shape.attention_bytes, shape.block_bytes, shape.expert_bytes


def test_elements_of_four_bits_are_half_a_byte_and_those_with_a_shared_scale_a_little_more() -> None:
    config = read_config(CLUSTERS / "experts-671b")
    assert quantized(config, quant_method="awq", bits=4, group_size=128) == (2, 0.5, 0.5, 0.5)
    four = quantized(config, quant_method="mxfp4")
    assert four[0] == 2 and four[3] == 0.5 + 1 / 32


@pytest.mark.parametrize(
    "word",
    ["linear_num_key_heads", "mamba_n_heads", "mamba_num_heads", "conv_L_cache", "o_groups", "index_topk"],
)
def test_every_kind_of_layer_whose_cost_is_not_known_is_refused_by_its_word(word: str) -> None:
    config = read_config(CLUSTERS / "dense-8b")
    with pytest.raises(ConfigError, match=f"dense-8b has {word}, and its costs are not known here"):
        shape_of(replace(config, words={**config.words, word: 2}))
    shape_of(replace(config, words={**config.words, word: 0}))
