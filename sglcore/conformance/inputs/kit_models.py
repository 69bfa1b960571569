"""The kit's own models: tiny, random, seeded, written as checkpoints. Every weight is exact in
bfloat16, so that a device that computes in 16 bits runs the same weights as the reference in
float32.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglcore.conformance.inputs.kit_models_sparse import SPARSE_MODELS, sparse_weights
from sglcore.conformance.inputs.prompts import VOCAB

CONTEXT = 256
LAYERS = 2
KV_HEADS = 2

_SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
)
_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
)
_EVERY: Mapping[str, Any] = MappingProxyType({**_EXPERTS, "num_experts_per_tok": _EXPERTS["num_experts"]})
_HYBRID: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-2,
    }
)
"""The epsilon of its norms is large, so that the norm of a small sum does not amplify a rounding
error."""
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "dense": MappingProxyType({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
        "window": MappingProxyType(
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 6}
        ),
        "moe": MappingProxyType({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_EXPERTS}),
        "moe-all": MappingProxyType({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_EVERY}),
        "hybrid": _HYBRID,
        "alternating": MappingProxyType(
            {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
            }
        ),
        "text": MappingProxyType({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
        "spoiled": MappingProxyType({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_EXPERTS}),
        "spoiled-all": MappingProxyType(
            {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_EVERY}
        ),
        "spoiled-hybrid": _HYBRID,
        **SPARSE_MODELS,
    }
)
"""Models with grouped-query attention. "window" has a sliding window, "moe" experts, "hybrid" a
recurrent state in its first layer, "alternating" a sliding window in its first layer only, "text" a
tokenizer. "spoiled" (with experts) and "spoiled-hybrid" have NaN for token 0. A "-all" model routes
each token to every expert, so that rounding changes no choice."""

SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "hybrid": MappingProxyType({"poison": True}),
        "alternating": MappingProxyType({"max_batch_tokens": 16}),
        **dict.fromkeys(
            SPARSE_MODELS,
            MappingProxyType(
                {
                    "poison": True,
                    "max_batch_tokens": 64,
                    "page_size": 16,
                    "dtype": "float32",
                    "attention_backend": None,
                }
            ),
        ),
    }
)
"""Settings for some models. "hybrid": a state that was not written is NaN. "alternating": steps are
so short that the sliding window gets pages of its own. Sparse models: both; also float32, in which
rounding changes no choice of entries, and the backend that takes such layers, whatever backend
serves other models."""

SMOOTH: Mapping[str, str] = MappingProxyType({"moe": "moe-all", "spoiled": "spoiled-all"})
"""For each model with experts, the model that replaces it where models run in 16 bits."""


def write_checkpoint(folder: Path, model: str, head_dim: int, seed: int = 0) -> Path:
    """Write `config.json` and `model.safetensors` of a model of `MODELS`, for "text" also a
    tokenizer, and return the folder, which is made if necessary. Equal arguments write equal
    weights."""
    config = {**_SIZES, "head_dim": head_dim, **MODELS[model]}
    folder.mkdir(parents=True, exist_ok=True)
    if model == "text":
        config = {**config, **_copy_tokenizer(folder)}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator(device="cpu").manual_seed(seed)
    if model in SPARSE_MODELS:
        save_file(sparse_weights(folder, config, generator), folder / "model.safetensors")
        return folder
    weights = {name: _values(name, shape, generator, config) for name, shape in _shapes(config)}
    if model.startswith("spoiled"):
        weights["model.embed_tokens.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    return folder


def _copy_tokenizer(folder: Path) -> dict[str, int]:
    """Copy the embedded model's tokenizer files and generation defaults into the folder; return
    {"vocab_size": its number of tokens}, for `config.json`.
    """
    demo = files("sglcore") / "assets" / "demo"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((demo / name).read_bytes())
    return {"vocab_size": json.loads((demo / "config.json").read_text())["vocab_size"]}


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator, config: Mapping[str, Any]) -> Tensor:
    """Return random values for the weight `name`, large enough that a wrong weight shows, and small
    enough that a rounding does not; exact in bfloat16."""
    drawn = torch.randn(shape, generator=generator, device="cpu")
    if "norm" in name:
        adds_one = config["model_type"] == _HYBRID["model_type"] and "linear_attn" not in name
        values = 0.2 * drawn + (not adds_one)
    elif "embed" in name:
        values = drawn
    else:
        values = drawn * 1.2 * shape[-1] ** -0.5
    return values.to(torch.bfloat16).float()


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if config.get("layer_types", ())[layer : layer + 1] == ["linear_attention"]:
            yield from _delta_net_shapes(f"{prefix}.linear_attn", config)
        else:
            yield from _attention_shapes(f"{prefix}.self_attn", config)
        yield from _mlp_shapes(f"{prefix}.mlp", config)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _attention_shapes(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    is_gated = "linear_num_key_heads" in config
    yield f"{prefix}.q_proj.weight", (queries * (1 + is_gated), hidden)
    yield f"{prefix}.k_proj.weight", (keys, hidden)
    yield f"{prefix}.v_proj.weight", (keys, hidden)
    yield f"{prefix}.o_proj.weight", (hidden, queries)
    if is_gated or "num_experts" in config:
        yield f"{prefix}.q_norm.weight", (dim,)
        yield f"{prefix}.k_norm.weight", (dim,)


def _delta_net_shapes(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys, values = (config[f"linear_num_{part}_heads"] * config[f"linear_{part}_head_dim"] for part in ("key", "value"))
    yield f"{prefix}.in_proj_qkv.weight", (2 * keys + values, hidden)
    yield f"{prefix}.in_proj_z.weight", (values, hidden)
    yield f"{prefix}.in_proj_b.weight", (heads, hidden)
    yield f"{prefix}.in_proj_a.weight", (heads, hidden)
    yield f"{prefix}.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield f"{prefix}.A_log", (heads,)
    yield f"{prefix}.dt_bias", (heads,)
    yield f"{prefix}.norm.weight", (config["linear_value_head_dim"],)
    yield f"{prefix}.out_proj.weight", (hidden, values)


def _mlp_shapes(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    if "num_experts" not in config:
        blocks, size = [prefix], config["intermediate_size"]
    else:
        blocks = [f"{prefix}.experts.{expert}" for expert in range(config["num_experts"])]
        size = config["moe_intermediate_size"]
        yield f"{prefix}.gate.weight", (config["num_experts"], hidden)
    for block in blocks:
        yield f"{block}.gate_proj.weight", (size, hidden)
        yield f"{block}.up_proj.weight", (size, hidden)
        yield f"{block}.down_proj.weight", (hidden, size)
