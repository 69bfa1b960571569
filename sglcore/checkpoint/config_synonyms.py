"""Rewrites the `config.json` of architectures with keys of their own into the common keys: renames
keys (`WORDS`), and computes values that the file has in another form, such as `layer_types`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_QWEN4_EXP = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")
_LFM2: Mapping[str, str] = MappingProxyType({"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"})
# Only the rotated part of a head has frequencies, so its size takes the place of the head size.
_LATENT: Mapping[str, str] = MappingProxyType({"qk_rope_head_dim": "head_dim"})
WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "DeepseekV4ForCausalLM": MappingProxyType(
            {"window_size": "sliding_window", "n_hash_layers": "num_hash_layers"}
        ),
        "DeepseekV2ForCausalLM": _LATENT,
        "DeepseekV3ForCausalLM": _LATENT,
        "DeepseekV32ForCausalLM": _LATENT,
        "Glm4MoeLiteForCausalLM": _LATENT,
        "GlmMoeDsaForCausalLM": _LATENT,
        "Lfm2ForCausalLM": MappingProxyType({**_LFM2, "block_ff_dim": "intermediate_size"}),
        "Lfm2MoeForCausalLM": MappingProxyType({**_LFM2, "num_dense_layers": "first_k_dense_replace"}),
        "NemotronHForCausalLM": MappingProxyType(
            {
                "layer_norm_epsilon": "rms_norm_eps",
                "mlp_hidden_act": "hidden_act",
                "hybrid_override_pattern": "layer_types",
                "layers_block_type": "layer_types",
                "mamba_num_heads": "mamba_n_heads",
                "mamba_head_dim": "mamba_d_head",
                "n_groups": "mamba_n_groups",
                "ssm_state_size": "mamba_d_state",
                "conv_kernel": "mamba_d_conv",
                "use_conv_bias": "mamba_conv_bias",
                "use_bias": "mamba_proj_bias",
                "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
            }
        ),
    }
)
"""By architecture: its own key -> the common key. The last key that is present counts."""


def renamed(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that replace or extend the file's `values`, not all of these: an
    architecture's own keys under the common names (`WORDS`), and common values that are computed
    for some architectures. Empty for an architecture without such keys."""
    found = {ours: values[own] for own, ours in WORDS.get(architecture, {}).items() if own in values}
    if architecture == "Lfm2ForCausalLM":
        found |= _lfm2_layers(values)
        found["intermediate_size"] = _lfm2_size({**values, **found})
    if architecture == "DeepseekV4ForCausalLM":
        found |= _deepseek_v4_layers(values)
    if architecture == "NemotronHForCausalLM":
        found["num_hidden_layers"] = len({**values, **found}["layer_types"])
    if architecture == "DeepseekV2ForCausalLM" and values.get("topk_method", "greedy") == "greedy":
        found |= {"n_group": 1, "topk_group": 1}
    if architecture in ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", *_QWEN4_EXP):
        kinds = values.get("layer_types", ())
        found["layer_types"] = ["full_attention" if kind == "indexed_attention" else kind for kind in kinds]
    if architecture in _QWEN4_EXP and "indexer_budget" in values:
        found["dense_context"] = values["indexer_budget"] + values["indexer_compress_ratio"] - 1
    return found


def _deepseek_v4_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to add under the common names, for `values` with the architecture's
    defaults. All layers have experts and a sliding window; some also attend to compressed blocks.

    The rotary embedding of layers with blocks is `block_rope`: the file's `compress`, or its single
    rope with `compress_rope_theta`. The other layers have the file's `main`, or plain `rope_theta`.
    """
    both = {**values.get("rope_parameters", {}), **values.get("rope_scaling", {})}
    partial = values.get("partial_rotary_factor", values.get("qk_rope_head_dim", 64) / max(values["head_dim"], 1))
    size = values.get("moe_intermediate_size", values.get("intermediate_size", 2048))
    return {
        "intermediate_size": size,
        "moe_intermediate_size": size,
        "layer_types": ["sliding_attention"] * values.get("num_hidden_layers", 0),
        "partial_rotary_factor": partial,
        "rope_parameters": both.get("main", {"rope_theta": values["rope_theta"]}),
        "rope_scaling": {},
        "block_rope": both.get("compress", {**both, "rope_theta": values["compress_rope_theta"]}),
    }


def _lfm2_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"layer_types": a list of "full_attention" and "conv"}: older files list the layers
    with attention, in `full_attn_idxs`; without this list all layers have it. Empty if the file has
    `layer_types`."""
    layers = range(values.get("num_hidden_layers", 0))
    full = values.get("full_attn_idxs", layers)
    kinds = ["full_attention" if layer in full else "conv" for layer in layers]
    return {} if "layer_types" in values else {"layer_types": kinds}


def _lfm2_size(values: Mapping[str, Any]) -> int:
    """Return the intermediate size: two thirds of the file's number, times
    `block_ffn_dim_multiplier`, rounded up to a multiple of `block_multiple_of`; the file's number
    itself if `block_auto_adjust_ff_dim` is false."""
    size = values.get("intermediate_size", 12288)
    if not values.get("block_auto_adjust_ff_dim", True):
        return size
    size, multiple = int(2 * size / 3), values.get("block_multiple_of", 256)
    return -(-int(values.get("block_ffn_dim_multiplier", 1.0) * size) // multiple) * multiple
