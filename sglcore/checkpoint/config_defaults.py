"""`DEFAULTS`: the values that an architecture's `config.json` may leave out. `OPTIONS`: options
that only some architectures know, with the value that changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_GEMMA: Mapping[str, Any] = MappingProxyType(
    {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256}
)
_GLM: Mapping[str, Any] = MappingProxyType(
    {
        "partial_rotary_factor": 0.5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "rms_norm_eps": 0.00000015625,
    }
)
_QWEN35: Mapping[str, Any] = MappingProxyType(
    {"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768}
)
_QWEN35_MOE: Mapping[str, Any] = MappingProxyType(
    {
        **_QWEN35,
        "num_key_value_heads": 2,
        "intermediate_size": 0,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }
)
_QWEN4_EXP: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "intermediate_size": 0,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }
)
_LFM2: Mapping[str, Any] = MappingProxyType(
    {"num_key_value_heads": 8, "norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": True}
)
_DEEPSEEK_V4: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
    }
)
_LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_shared_experts": 1,
    }
)
_DEEPSEEK3: Mapping[str, Any] = MappingProxyType(
    {
        **_LATENT,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    }
)
_GLM_LATENT: Mapping[str, Any] = MappingProxyType(
    {
        **_DEEPSEEK3,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
    }
)
_INDEXER: Mapping[str, Any] = MappingProxyType({"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64})
_GPT_OSS_ROPE: Mapping[str, Any] = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
        "rope_theta": 150000.0,
    }
)
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": MappingProxyType(
            {**_LATENT, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
        ),
        "DeepseekV3ForCausalLM": _DEEPSEEK3,
        "DeepseekV32ForCausalLM": MappingProxyType({**_DEEPSEEK3, **_INDEXER}),
        "Glm4MoeLiteForCausalLM": MappingProxyType(
            {
                **_GLM_LATENT,
                "q_lora_rank": 768,
                "n_routed_experts": 64,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1536,
                "routed_scaling_factor": 1.8,
                "first_k_dense_replace": 1,
            }
        ),
        "DeepseekV4ForCausalLM": _DEEPSEEK_V4,
        "GlmMoeDsaForCausalLM": MappingProxyType({**_GLM_LATENT, **_INDEXER, "q_lora_rank": 2048, "index_n_heads": 32}),
        "GemmaForCausalLM": MappingProxyType(
            {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 16}
        ),
        "Gemma2ForCausalLM": MappingProxyType(
            {
                **_GEMMA,
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "sliding_window_pattern": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            }
        ),
        "Gemma3ForCausalLM": MappingProxyType(
            {
                **_GEMMA,
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
            }
        ),
        "GraniteForCausalLM": MappingProxyType({"attention_multiplier": 1.0}),
        "GraniteMoeForCausalLM": MappingProxyType(
            {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
        ),
        "GraniteMoeHybridForCausalLM": MappingProxyType(
            {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
        ),
        "Olmo2ForCausalLM": MappingProxyType({"rms_norm_eps": 1e-5}),
        "Olmo3ForCausalLM": MappingProxyType(
            {
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "rope_theta": 500000.0,
                "rope_local_base_freq": 500000.0,
            }
        ),
        "Phi3ForCausalLM": MappingProxyType({"use_sliding_window": True, "rms_norm_eps": 1e-5}),
        "GptOssForCausalLM": MappingProxyType(
            {
                "num_key_value_heads": 8,
                "head_dim": 64,
                "attention_bias": True,
                "sliding_window": 128,
                "sliding_window_pattern": 2,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "norm_topk_prob": True,
                "swiglu_alpha": 1.702,
                "swiglu_limit": 7.0,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0,
                "rope_parameters": _GPT_OSS_ROPE,
            }
        ),
        "GlmForCausalLM": _GLM,
        "Glm4ForCausalLM": _GLM,
        "Glm4MoeForCausalLM": MappingProxyType(
            {
                "partial_rotary_factor": 0.5,
                "num_key_value_heads": 8,
                "n_routed_experts": 128,
                "n_shared_experts": 1,
                "moe_intermediate_size": 1408,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
                "rms_norm_eps": 1e-5,
            }
        ),
        "MixtralForCausalLM": MappingProxyType(
            {
                "use_sliding_window": True,
                "num_key_value_heads": 8,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1000000.0,
            }
        ),
        "MiMoForCausalLM": MappingProxyType({"max_window_layers": 28}),
        "MistralForCausalLM": MappingProxyType(
            {"use_sliding_window": True, "sliding_window": 4096, "num_key_value_heads": 8}
        ),
        "Qwen2ForCausalLM": MappingProxyType({"max_window_layers": 28}),
        "Qwen2MoeForCausalLM": MappingProxyType(
            {
                "use_sliding_window": False,
                "sliding_window": 4096,
                "sliding_window_pattern": 2,
                "max_window_layers": 28,
                "qkv_bias": True,
                "num_key_value_heads": 16,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
            }
        ),
        "Qwen2_5_VLForConditionalGeneration": MappingProxyType(
            {"max_window_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}
        ),
        "Qwen3VLForConditionalGeneration": MappingProxyType(
            {"head_dim": 128, "num_key_value_heads": 32, "rope_theta": 500000.0}
        ),
        "Qwen3ForCausalLM": MappingProxyType({"max_window_layers": 28, "head_dim": 128}),
        "Qwen3NextForCausalLM": MappingProxyType(
            {
                "num_key_value_heads": 2,
                "head_dim": 256,
                "partial_rotary_factor": 0.25,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "norm_topk_prob": True,
            }
        ),
        "Qwen3_5ForCausalLM": _QWEN35,
        "Qwen3_5ForConditionalGeneration": _QWEN35,
        "Qwen3_5MoeForCausalLM": _QWEN35_MOE,
        "Qwen3_5MoeForConditionalGeneration": _QWEN35_MOE,
        "Qwen4ExpForCausalLM": _QWEN4_EXP,
        "Qwen4ExpForConditionalGeneration": _QWEN4_EXP,
        "Lfm2ForCausalLM": _LFM2,
        "Lfm2MoeForCausalLM": MappingProxyType(
            {
                **_LFM2,
                "num_experts": 32,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 1792,
                "num_dense_layers": 2,
                "norm_topk_prob": True,
            }
        ),
        "NemotronHForCausalLM": MappingProxyType(
            {
                "layer_types": ("linear_attention", "moe", "full_attention", "mlp"),
                "num_key_value_heads": 8,
                "head_dim": 128,
                "layer_norm_epsilon": 1e-5,
                "mlp_hidden_act": "relu2",
                "mamba_head_dim": 64,
                "n_groups": 8,
                "ssm_state_size": 128,
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "moe_intermediate_size": 7688,
                "moe_shared_expert_intermediate_size": 7688,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
            }
        ),
        "Qwen3MoeForCausalLM": MappingProxyType(
            {"num_key_value_heads": 4, "num_local_experts": 128, "moe_intermediate_size": 768}
        ),
    }
)
"""The values of missing keys, where architectures differ."""

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "attention_multiplier": None,
        "attn_logit_softcapping": None,
        "embedding_multiplier": 1.0,
        "final_logit_softcapping": None,
        "logits_scaling": 1.0,
        "mamba_hidden_act": "silu",
        "n_group": 1,
        "n_shared_experts": 0,
        "query_pre_attn_scalar": None,
        "residual_multiplier": 1.0,
        "rope_local_base_freq": None,
        "routed_scaling_factor": 1.0,
        "shared_expert_intermediate_size": 0,
        "swiglu_alpha": None,
        "swiglu_limit": None,
        "use_expert_bias": True,
        "use_qk_norm": False,
        "use_bidirectional_attention": False,
    }
)
"""Options that some architectures know and others do not, with the value that changes nothing."""
