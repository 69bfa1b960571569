"""Tiny random checkpoints with latent attention, saved by transformers, which is also the oracle
for loading them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.checkpoints import Oracle, rope, save

YARN = rope("yarn", factor=40.0, original_max_position_embeddings=256, mscale=0.7, mscale_all_dim=1.0)
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 72,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 20,
        "v_head_dim": 12,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **YARN,
    }
)
"""All parts of a head have different sizes, so that a swapped one shows."""
INDEXER: Mapping[str, Any] = MappingProxyType({"index_topk": 16, "index_head_dim": 32, "index_n_heads": 16})
"""With 16 heads: a sum of few rectified scores is often 0, and ties have no defined order."""


def make_oracle(config: Oracle, architecture: str, seed: int = 0) -> Oracle:
    """Return a model in float32. Every weight contributes about equally to the output."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model, generator = getattr(transformers, architecture)(config).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            elif "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                tensor.copy_(0.1 * noise)
    return model


def deepseek_v2(**changes: Any) -> Oracle:
    """A DeepSeek-V2 with expert groups, where a token chooses fewer groups than experts: a group is
    scored by its best expert, so otherwise the limit would have no effect."""
    rules = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2}
    rules |= {"num_experts_per_tok": 3}
    return make_oracle(transformers.DeepseekV2Config(**{**SIZES, **rules, **changes}), "DeepseekV2ForCausalLM")


def deepseek_v3(**changes: Any) -> Oracle:
    """A DeepSeek-V3."""
    return make_oracle(transformers.DeepseekV3Config(**{**SIZES, **changes}), "DeepseekV3ForCausalLM")


def deepseek_v32(**changes: Any) -> Oracle:
    """A DeepSeek-V3.2; each token sees 16 tokens."""
    config = transformers.DeepseekV32Config(**{**SIZES, **INDEXER, **changes})
    return make_oracle(config, "DeepseekV32ForCausalLM")


def glm4_moe_lite(**changes: Any) -> Oracle:
    """A GLM-4.7-Flash; its inner norms have another epsilon than the others."""
    sizes = {**SIZES, "n_group": 1, "rms_norm_eps": 1e-2, **rope("default")}
    return make_oracle(transformers.Glm4MoeLiteConfig(**{**sizes, **changes}), "Glm4MoeLiteForCausalLM")


def glm_moe_dsa(**changes: Any) -> Oracle:
    """A GLM-5; its second layer shares the indexer's choice of the first."""
    sizes = {**SIZES, **INDEXER, "n_group": 1, **rope("default"), "indexer_types": ["full", "shared", "full"]}
    return make_oracle(transformers.GlmMoeDsaConfig(**{**sizes, **changes}), "GlmMoeDsaForCausalLM")


LATENT: Mapping[str, Callable[[], Oracle]] = MappingProxyType(
    {
        "deepseek-v2": deepseek_v2,
        "deepseek-v2-lite": lambda: deepseek_v2(
            q_lora_rank=None, topk_method="greedy", routed_scaling_factor=1.0, attention_bias=True
        ),
        "deepseek-v3": deepseek_v3,
        "deepseek-v3-biases-tied": lambda: deepseek_v3(attention_bias=True, tie_word_embeddings=True),
        "deepseek-v3.2": deepseek_v32,
        "deepseek-v3.2-sees-all": lambda: deepseek_v32(index_topk=64, index_head_dim=16),
        "glm4-moe-lite": glm4_moe_lite,
        "glm-moe-dsa": glm_moe_dsa,
    }
)
"""Models by name; each call makes one from a fixed seed."""


BLOCK = 16
WHOLE = ("embed_tokens", "lm_head", "norm", "gate.weight", "weights_proj", "bias")
"""Parts of the names of tensors that published files do not quantize."""


def publish(oracle: Oracle, folder: Path) -> Oracle:
    """Save as DeepSeek's files are published: float8 with block scales, MTP layers, and older
    configuration keys. Returns the model with the decoded values."""
    generator = torch.Generator().manual_seed(5)
    save(oracle, folder)
    values = load_file(folder / "model.safetensors")
    stored, meant = {f"model.layers.{layer}.eh_proj.weight": torch.zeros(4, 8) for layer in (3, 4)}, {}
    for name, weight in values.items():
        stored[name] = meant[name] = weight
        if not any(part in name for part in WHOLE):
            shape = [-(-size // BLOCK) for size in weight.shape]
            scales = (0.5 + torch.rand(shape, generator=generator)) * weight.abs().max() / 400
            wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: len(weight), : weight.shape[1]]
            floats = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored |= {name: floats, f"{name}_scale_inv": scales}
            meant[name] = floats.float() * wide
    save_file(meant, folder / "model.safetensors", {"format": "pt"})
    found = type(oracle).from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_older(json.loads((folder / "config.json").read_text()))))
    return found.eval()


def _older(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the keys of files published in 2024."""
    scaling = config.pop("rope_parameters")
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    for name in ("head_dim", "qk_head_dim", "layer_types", "mlp_layer_types", "dtype", "rope_interleave"):
        config.pop(name, None)
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [BLOCK] * 2}
    routing = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1}
    behind = {"num_nextn_predict_layers": 2}
    return {
        **config,
        **routing,
        **behind,
        "torch_dtype": "float32",
        "rope_theta": theta,
        "rope_scaling": {"type": kind, "beta_fast": 32, "beta_slow": 1, **scaling},
        "quantization_config": blocks,
    }
