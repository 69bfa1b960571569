"""Tiny random checkpoints, saved by transformers, which is also the oracle for loading them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
"""Sizes that differ, so that a swapped dimension shows; `initializer_range` is large, so that a
wrong weight shows."""

Oracle = Any
"""A transformers model."""


def make_oracle(config: Oracle, architecture: str, seed: int = 0) -> Oracle:
    """Return a random model in float32; norms and biases are random too, so that a missing one
    shows."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager" if architecture.startswith(("Gemma2", "GptOss", "Mamba")) else "sdpa"
    if any(name in architecture for name in ("Moe", "GptOss", "NemotronH", "Qwen4Exp")):
        config._experts_implementation = "eager"
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def save(model: Oracle, folder: Path, max_shard_size: str = "1GB") -> Path:
    """Save as safetensors, in shards of at most `max_shard_size`; returns the folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def llama(**changes: Any) -> Oracle:
    """A Llama."""
    return make_oracle(transformers.LlamaConfig(**{**SIZES, **changes}), "LlamaForCausalLM")


def mistral(**changes: Any) -> Oracle:
    """A Mistral."""
    return make_oracle(transformers.MistralConfig(**{**SIZES, **changes}), "MistralForCausalLM")


def qwen2(**changes: Any) -> Oracle:
    """A Qwen 2."""
    return make_oracle(transformers.Qwen2Config(**{**SIZES, **changes}), "Qwen2ForCausalLM")


def qwen3(**changes: Any) -> Oracle:
    """A Qwen 3; its head size is larger than hidden size / heads."""
    return make_oracle(transformers.Qwen3Config(**{**SIZES, "head_dim": 20, **changes}), "Qwen3ForCausalLM")


def qwen3_moe(**changes: Any) -> Oracle:
    """A sparse Qwen 3 with five experts, two for each token."""
    sizes = {"head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    return make_oracle(transformers.Qwen3MoeConfig(**{**SIZES, **sizes, **changes}), "Qwen3MoeForCausalLM")


def mixtral(**changes: Any) -> Oracle:
    """A Mixtral with five experts."""
    return make_oracle(transformers.MixtralConfig(**{**SIZES, "num_local_experts": 5, **changes}), "MixtralForCausalLM")


def qwen2_moe(**changes: Any) -> Oracle:
    """A sparse Qwen 2; its second layer is dense."""
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]}
    config = transformers.Qwen2MoeConfig(**{**SIZES, **sizes, "shared_expert_intermediate_size": 28, **changes})
    return make_oracle(config, "Qwen2MoeForCausalLM")


def glm4_moe(**changes: Any) -> Oracle:
    """A GLM-4.5 with a dense first layer; each token's experts come from three of four groups."""
    sizes = {"head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
    rules = {"n_group": 4, "topk_group": 3, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True}
    model = make_oracle(transformers.Glm4MoeConfig(**{**SIZES, **sizes, **rules, **changes}), "Glm4MoeForCausalLM")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    # Published files also have an MTP layer after the last one, which the model itself does
    # not run.
    model.model.layers.append(torch.nn.ModuleDict({"eh_proj": torch.nn.Linear(4, 4, bias=False)}))
    return model


def glm(**changes: Any) -> Oracle:
    """A GLM-4 of 2024."""
    sizes = {"head_dim": 12, "attention_bias": True}
    return make_oracle(transformers.GlmConfig(**{**SIZES, **sizes, **changes}), "GlmForCausalLM")


def glm4(**changes: Any) -> Oracle:
    """A GLM-4 of 2025."""
    sizes = {"head_dim": 12, "attention_bias": True}
    return make_oracle(transformers.Glm4Config(**{**SIZES, **sizes, **changes}), "Glm4ForCausalLM")


def gpt_oss(**changes: Any) -> Oracle:
    """A gpt-oss with a sliding window in its first layer. Its activation limit is low enough to
    clamp."""
    sizes = {"head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6, "swiglu_limit": 0.8}
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, truncate=False)
    return make_oracle(transformers.GptOssConfig(**{**SIZES, **sizes, **yarn, **changes}), "GptOssForCausalLM")


def with_mxfp4_experts(model: Oracle, folder: Path) -> Path:
    """Save a gpt-oss as it is published, with random MXFP4 codes as experts, and give the model the
    decoded values."""
    # This import takes as long as all others of this file together; a hundred test files import
    # this file.
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    save(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 127, groups, dtype=torch.uint8, generator=generator)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data.copy_(values)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def phi3(**changes: Any) -> Oracle:
    """A Phi 3 or 4 with partial rotary."""
    sizes = {"partial_rotary_factor": 0.5}
    return make_oracle(transformers.Phi3Config(**{**SIZES, **sizes, **changes}), "Phi3ForCausalLM")


GRANITE = {"embedding_multiplier": 1.7, "attention_multiplier": 0.4, "residual_multiplier": 0.6, "logits_scaling": 1.3}


def granite(**changes: Any) -> Oracle:
    """A Granite with all of its multipliers."""
    return make_oracle(transformers.GraniteConfig(**{**SIZES, **GRANITE, **changes}), "GraniteForCausalLM")


def granite_moe(**changes: Any) -> Oracle:
    """A sparse Granite with five experts."""
    sizes = {**SIZES, **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2}
    return make_oracle(transformers.GraniteMoeConfig(**{**sizes, **changes}), "GraniteMoeForCausalLM")


def granite_hybrid(**changes: Any) -> Oracle:
    """A Granite 4 with attention in its second layer."""
    space = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 16, "mamba_d_conv": 3}
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 28}
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
    config = transformers.GraniteMoeHybridConfig(**{**SIZES, **GRANITE, **space, **experts, **kinds, **changes})
    return make_oracle(config, "GraniteMoeHybridForCausalLM")


def olmo2(**changes: Any) -> Oracle:
    """An OLMo 2."""
    return make_oracle(transformers.Olmo2Config(**{**SIZES, **changes}), "Olmo2ForCausalLM")


def olmo3(**changes: Any) -> Oracle:
    """An OLMo 3; its full-attention layer has other rotary settings."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e5}
    kinds = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    sizes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "rope_parameters": kinds}
    return make_oracle(transformers.Olmo3Config(**{**SIZES, **sizes, **changes}), "Olmo3ForCausalLM")


def gemma3(**changes: Any) -> Oracle:
    """A text-only Gemma 3: every second layer has a sliding window, with other rotary settings."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = {**SIZES, "head_dim": 20, "layer_types": kinds, "query_pre_attn_scalar": 24, "sliding_window": 6}
    return make_oracle(transformers.Gemma3TextConfig(**{**sizes, **changes}), "Gemma3ForCausalLM")


def gemma(**changes: Any) -> Oracle:
    """A Gemma 1."""
    return make_oracle(transformers.GemmaConfig(**{**SIZES, "head_dim": 20, **changes}), "GemmaForCausalLM")


def gemma2(**changes: Any) -> Oracle:
    """A Gemma 2 with a sliding window in its first layer; its softcaps are low enough to have an
    effect."""
    sizes = {"head_dim": 20, "sliding_window": 6, "query_pre_attn_scalar": 24}
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return make_oracle(transformers.Gemma2Config(**{**SIZES, **sizes, **caps, **changes}), "Gemma2ForCausalLM")


def hybrid_sizes() -> dict[str, Any]:
    """Sizes of three layers, with attention in the second and half of each head rotated. The large
    epsilon keeps norms of small sums from amplifying float32 rounding."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
    sizes = {"linear_value_head_dim": 8, "num_hidden_layers": 3, "head_dim": 24, "rms_norm_eps": 1e-3}
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    return {**SIZES, **heads, **sizes, **kinds, **rope("default", partial_rotary_factor=0.5)}


_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}


def qwen3_next(**changes: Any) -> Oracle:
    """A Qwen3-Next with a dense third layer."""
    config = transformers.Qwen3NextConfig(**{**hybrid_sizes(), **_EXPERTS, "mlp_only_layers": [2], **changes})
    config._experts_implementation = "eager"
    return make_oracle(config, "Qwen3NextForCausalLM")


def qwen35(**changes: Any) -> Oracle:
    """A dense Qwen 3.5."""
    config = transformers.Qwen3_5TextConfig(**{**hybrid_sizes(), **changes})
    return make_oracle(config, "Qwen3_5ForCausalLM")


def qwen35_moe(**changes: Any) -> Oracle:
    """A sparse Qwen 3.5."""
    sizes = {name: size for name, size in hybrid_sizes().items() if name != "intermediate_size"}
    config = transformers.Qwen3_5MoeTextConfig(**{**sizes, **_EXPERTS, **changes})
    return make_oracle(config, "Qwen3_5MoeForCausalLM")


def qwen4_exp(**changes: Any) -> Oracle:
    """A Qwen4-Exp with tables of n-grams in its first and third layer; texts of its whole context
    are dense."""
    sizes = {name: size for name, size in hybrid_sizes().items() if name != "intermediate_size"}
    kinds = ["linear_attention", "indexed_attention", "linear_attention"]
    streams = {"hc_count": 3, "hc_lowrank": 10, "layer_types": kinds}
    ngrams = {"ple_layer_ids": [1, 3], "ple_embed_dim": 24, "heads_per_ngram": 2, "ngram_vocab_size_base": 50}
    table = {"make_ngram_vocab_size_divisible_by": 16, "split_ngram_parts": 3}
    index = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
    index |= {"indexer_budget": changes.get("max_position_embeddings", 64), "indexer_compress_ratio": 4}
    own = {**sizes, **_EXPERTS, **streams, **ngrams, **table, **index}
    model = make_oracle(transformers.Qwen4ExpTextConfig(**{**own, **changes}), "Qwen4ExpForCausalLM")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("ple.conv1d.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def lfm2(**changes: Any) -> Oracle:
    """An LFM2 with attention in its second layer; its feed-forward blocks are 48 wide, two thirds
    of the configured size."""
    sizes = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 16}
    return make_oracle(transformers.Lfm2Config(**{**SIZES, **sizes, **changes}), "Lfm2ForCausalLM")


def lfm2_moe(**changes: Any) -> Oracle:
    """A sparse LFM2 with a dense first layer."""
    sizes = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1}
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "routed_scaling_factor": 1.5}
    model = make_oracle(transformers.Lfm2MoeConfig(**{**SIZES, **sizes, **experts, **changes}), "Lfm2MoeForCausalLM")
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model


def nemotron_h(**changes: Any) -> Oracle:
    """A Nemotron-H with a layer of each kind. Its transformers class limits the time steps of
    prompts by another number than the configured one, and those of single tokens not at all; here
    the limit has no effect."""
    space = {"mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2, "ssm_state_size": 12, "conv_kernel": 3}
    kinds = ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4}
    experts |= {"topk_group": 3, "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 1.5}
    sizes = {**SIZES, **space, **experts, "layers_block_type": kinds, "head_dim": 20, "chunk_size": 16}
    model = make_oracle(transformers.NemotronHConfig(**{**sizes, **changes}), "NemotronHForCausalLM")
    for layer in model.model.layers:
        if layer.block_type == "moe":
            layer.mixer.gate.e_score_correction_bias.copy_(torch.randn(8) * 0.1)
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = (0.0, float("inf"))
    return model


def exaone4(**changes: Any) -> Oracle:
    """An EXAONE 4, which has no file of ours: every second layer has a sliding window, and
    full-attention layers have no rotary embedding."""
    sizes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    return make_oracle(transformers.Exaone4Config(**{**SIZES, **sizes, **changes}), "Exaone4ForCausalLM")


def falcon(**changes: Any) -> Oracle:
    """A Falcon with its own attention in its class, and one K/V head."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97}
    own = {"initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return make_oracle(transformers.FalconConfig(**{**sizes, **own, **changes}), "FalconForCausalLM")


def falcon_h1(**changes: Any) -> Oracle:
    """A Falcon H1, which has no file of ours: each layer has attention and a Mamba 2 in
    parallel."""
    heads = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_ssm": 96, "mamba_d_state": 8, "mamba_chunk_size": 16}
    sizes = {**SIZES, "head_dim": 20, **heads, **changes}
    return make_oracle(transformers.FalconH1Config(**sizes), "FalconH1ForCausalLM")


def mamba2(**changes: Any) -> Oracle:
    """A Mamba 2, which has no attention."""
    sizes = {name: size for name, size in SIZES.items() if "heads" not in name and name != "max_position_embeddings"}
    heads = {"num_heads": 4, "head_dim": 24, "state_size": 8, "n_groups": 2, "chunk_size": 16}
    return make_oracle(transformers.Mamba2Config(**{**sizes, **heads, **changes}), "Mamba2ForCausalLM")


def bert(architecture: str = "BertModel", **changes: Any) -> Oracle:
    """A BERT encoder, or a BERT model with a head."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    return make_oracle(transformers.BertConfig(**{**sizes, **changes}), architecture)


def roberta(architecture: str = "XLMRobertaModel", **changes: Any) -> Oracle:
    """A RoBERTa or XLM-RoBERTa encoder, or a model with a head; positions begin after the padding
    position."""
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    kind = transformers.XLMRobertaConfig if architecture.startswith("XLM") else transformers.RobertaConfig
    own = {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    return make_oracle(kind(**{**sizes, **own, **changes}), architecture)


def modernbert(architecture: str = "ModernBertModel", **changes: Any) -> Oracle:
    """A ModernBERT encoder, or a model with a head: two of its three layers see three tokens to
    either side."""
    sizes = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "num_hidden_layers")}
    own = {"num_hidden_layers": 3, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}
    return make_oracle(transformers.ModernBertConfig(**{**sizes, **own, **changes}), architecture)


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    """Return rope parameters in the dialect of transformers 5."""
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": kind, **numbers}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "original_max_position_embeddings": 16,
}

CAUSAL: Mapping[str, Callable[[], Oracle]] = MappingProxyType(
    {
        "llama": llama,
        "llama-biases-tied": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "llama-multi-head": lambda: llama(num_key_value_heads=4),
        "llama-one-kv-head-wide": lambda: llama(num_key_value_heads=1, head_dim=20),
        "llama-linear-rope": lambda: llama(**rope("linear", factor=3.0)),
        "llama-dynamic-rope": lambda: llama(**rope("dynamic", factor=3.0)),
        "llama-llama3-rope": lambda: llama(**rope("llama3", **LLAMA3)),
        "llama-yarn-rope": lambda: llama(**rope("yarn", factor=4.0, original_max_position_embeddings=16)),
        "llama-yarn-rope-factor": lambda: llama(
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.7, beta_fast=16.0)
        ),
        "mistral": lambda: mistral(sliding_window=None),
        "mistral-window": lambda: mistral(sliding_window=5),
        "qwen2": qwen2,
        "qwen2-tied-windows": lambda: qwen2(
            tie_word_embeddings=True, use_sliding_window=True, sliding_window=4, max_window_layers=1
        ),
        "qwen3": qwen3,
        "qwen3-biases-tied": lambda: qwen3(attention_bias=True, tie_word_embeddings=True),
        "qwen3-layer-types": lambda: qwen3(
            use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
        ),
        "gemma": gemma,
        "gemma2": gemma2,
        "gemma3": gemma3,
        "gemma3-linear-rope-capped": lambda: gemma3(
            final_logit_softcapping=3.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        "mixtral": mixtral,
        "mixtral-window": lambda: mixtral(sliding_window=5),
        "qwen2-moe": qwen2_moe,
        "qwen3-next": lambda: qwen3_next(attention_bias=True),
        "qwen3.5": qwen35,
        "qwen3.5-moe": lambda: qwen35_moe(attention_bias=True),
        "qwen4-exp": qwen4_exp,
        "qwen4-exp-sigmoid": lambda: qwen4_exp(output_gate_type="sigmoid", ple_layer_ids=None),
        "lfm2": lfm2,
        "lfm2-biases": lambda: lfm2(conv_bias=True, block_auto_adjust_ff_dim=False, tie_word_embeddings=False),
        "lfm2-moe": lfm2_moe,
        "nemotron-h": nemotron_h,
        "nemotron-h-biases": lambda: nemotron_h(use_bias=True, mlp_bias=True, use_conv_bias=False, moe_latent_size=16),
        "qwen2-moe-windows": lambda: qwen2_moe(use_sliding_window=True, sliding_window=5),
        "gpt-oss": gpt_oss,
        "glm": glm,
        "glm4": glm4,
        "glm4-moe": glm4_moe,
        "glm4-moe-plain": lambda: glm4_moe(n_group=1, topk_group=1, use_qk_norm=False, norm_topk_prob=False),
        "phi3": phi3,
        "phi3-window-tied": lambda: phi3(sliding_window=5, tie_word_embeddings=True),
        "granite": granite,
        "granite-biases-tied": lambda: granite(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "granite-moe": granite_moe,
        "granite-hybrid": granite_hybrid,
        "granite-hybrid-dense": lambda: granite_hybrid(
            num_local_experts=0,
            position_embedding_type="rope",
            attention_bias=True,
            mamba_proj_bias=True,
            time_step_limit=[0.3, 1.1],
        ),
        "olmo2": olmo2,
        "olmo3": olmo3,
        "qwen3-moe": qwen3_moe,
        "qwen3-moe-normalised-one-dense": lambda: qwen3_moe(norm_topk_prob=True, mlp_only_layers=[1]),
        "qwen3-moe-every-second": lambda: qwen3_moe(decoder_sparse_step=2),
    }
)
"""Language models by name; each call makes one from a fixed seed."""


def oracle_logprobs(model: Oracle, ids: list[int]) -> Tensor:
    """float32 [len(ids), vocab]: log-probabilities after each token."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
