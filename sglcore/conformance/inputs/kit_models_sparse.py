"""The kit's models with cache entries other than keys and values.

Latent attention with an indexer, and compressed attention with a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import read_config
from sglcore.layers.build_scope import Weights
from sglcore.layers.torch_layers import Build
from sglcore.models.architecture_registry import model_class
from sglcore.runtime.kernels.table import KernelTable

_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
)
_INDEXER: Mapping[str, Any] = MappingProxyType({"index_n_heads": 16, "index_head_dim": 16, "index_topk": 5})
"""16 indexer heads: a sum over fewer rectified scores is often exactly 0, and entries with equal
scores have no defined order."""
SPARSE_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "latent": MappingProxyType(
            {
                "architectures": ["DeepseekV32ForCausalLM"],
                "model_type": "deepseek_v32",
                "num_key_value_heads": 4,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 1.0,
                "norm_topk_prob": True,
                "kv_lora_rank": 32,
                "q_lora_rank": 48,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 24,
                "v_head_dim": 16,
                **_EXPERTS,
                **_INDEXER,
            }
        ),
        "compressed": MappingProxyType(
            {
                "architectures": ["DeepseekV4ForCausalLM"],
                "model_type": "deepseek_v4",
                "num_key_value_heads": 1,
                "head_dim": 32,
                "partial_rotary_factor": 0.25,
                "q_lora_rank": 32,
                "o_groups": 2,
                "o_lora_rank": 16,
                "sliding_window": 6,
                "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
                "mlp_layer_types": ["hash_moe", "moe"],
                "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
                "hc_mult": 2,
                "hc_sinkhorn_iters": 3,
                "swiglu_limit": 1.0,
                "routed_scaling_factor": 1.5,
                **_EXPERTS,
                **_INDEXER,
            }
        ),
    }
)


def sparse_weights(folder: Path, config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Return random values for every weight that the model of a folder with `config.json` declares,
    by name; `config` is the content of that file."""
    read = read_config(folder)
    weights = Weights(torch.float32, torch.device("meta"))
    model_class(read.architecture)(Build(read, KernelTable(), weights, read.context_length))
    return {name: _values(name, target, generator, config) for name, target in weights.targets.items()}


def _values(name: str, target: Tensor, generator: torch.Generator, config: Mapping[str, Any]) -> Tensor:
    """Return random values for the weight `name` in the shape of `target`: as large as the terms
    that they are added to or multiplied with, so that each weight shows in the result; exact in
    bfloat16. An integer weight gets distinct expert numbers in each row."""
    if not target.is_floating_point():
        experts, (rows, chosen) = config["n_routed_experts"], target.shape
        return torch.stack([torch.randperm(experts, generator=generator, device="cpu")[:chosen] for _ in range(rows)])
    noise = torch.randn(target.shape, generator=generator, device="cpu")
    if "norm" in name and name.endswith("weight"):
        values = 1 + 0.2 * noise
    elif name.endswith((".scale", "_scale")):
        values = 0.5 + noise.abs() / 2
    elif "embed" in name or target.dim() < 2:
        values = noise * (1 if "embed" in name else 0.2)
    else:
        values = noise * 1.2 * target.shape[-1] ** -0.5
    return values.to(torch.bfloat16).float()
