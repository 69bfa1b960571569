"""The type of each configuration key, so that a wrong value is an error that names the key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglcore.core.errors import ConfigError

Kind = tuple[str, Callable[[Any], bool]]
"""A description of the wanted value, and a function that checks a value."""


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_above_zero(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_from_zero(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_limit(value: Any) -> bool:
    """Return whether a value is a number, also an infinite one, or transformers' form of one that
    JSON lacks: {"__float__": text}.
    """
    return type(value) in (int, float) or (isinstance(value, dict) and type(value.get("__float__")) is str)


def _is_list_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(each) in kinds for each in value)


_TRUTH = "true or false"
_NAMES: Mapping[Kind, str] = MappingProxyType(
    {
        ("a whole number above zero", _whole(1)): """
            hidden_size vocab_size num_hidden_layers num_attention_heads num_key_value_heads max_position_embeddings
            decoder_sparse_step n_group topk_group sliding_window_pattern max_seq_len full_attention_interval
            linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
            linear_conv_kernel_dim kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
            o_groups o_lora_rank index_n_heads index_head_dim index_topk hc_mult hc_sinkhorn_iters
            compress_rate_csa compress_rate_hca mamba_n_heads mamba_n_groups mamba_d_state
            mamba_d_conv mamba_expand draft_vocab_size target_hidden_size global_attn_every_n_layers
            conv_L_cache block_multiple_of moe_latent_size type_vocab_size hc_count hc_lowrank ple_embed_dim
            ple_conv_kernel_size ngram_size heads_per_ngram ngram_vocab_size_base split_ngram_parts
            make_ngram_vocab_size_divisible_by indexer_budget indexer_compress_ratio""",
        ("a whole number", _whole(0)): """
            num_experts_per_tok head_dim intermediate_size sliding_window local_attention max_window_layers
            first_k_dense_replace num_experts num_local_experts n_routed_experts n_shared_experts
            moe_intermediate_size shared_intermediate_size shared_expert_intermediate_size num_labels
            qk_rope_head_dim num_hash_layers num_nextn_predict_layers index_topk_freq index_skip_topk_offset""",
        ("a whole number above zero, or auto", lambda value: value == "auto" or _whole(1)(value)): "mamba_d_head",
        ("a number", _is_number): """
            rms_norm_eps layer_norm_eps norm_eps partial_rotary_factor attention_factor mscale mscale_all_dim
            embedding_multiplier residual_multiplier routed_scaling_factor swiglu_alpha swiglu_limit""",
        ("a number from zero on", _is_from_zero): "original_max_position_embeddings beta_fast beta_slow",
        ("a number above zero", _is_above_zero): """
            rope_theta global_rope_theta local_rope_theta rope_local_base_freq factor attention_multiplier
            logits_scaling query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping compress_rope_theta
            hc_eps block_ffn_dim_multiplier low_freq_factor high_freq_factor""",
        (
            "a list of two limits",
            lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_limit, value)),
        ): "time_step_limit",
        (
            "a list of three whole numbers",
            lambda value: isinstance(value, list) and len(value) == 3 and all(map(_whole(0), value)),
        ): "mrope_section",
        ("a letter or a word for each layer", lambda value: isinstance(value, str | list)): "index_topk_pattern",
        (_TRUTH, lambda value: type(value) is bool): """
            tie_word_embeddings attention_bias qkv_bias mlp_bias use_sliding_window norm_topk_prob use_qk_norm
            mamba_conv_bias mamba_proj_bias norm_bias classifier_bias truncate mrope_interleaved rope_interleave
            use_aux_hidden_state norm_before_fc norm_before_residual norm_output
            block_auto_adjust_ff_dim conv_bias""",
        ("a text", lambda value: type(value) is str): """
            model_type hidden_act hidden_activation rope_type type dtype torch_dtype position_embedding_type
            hybrid_override_pattern topk_method scoring_func classifier_pooling activation_fn
            sbert_ce_default_activation_function output_gate_type""",
        ("a list of texts", _is_list_of(str)): "architectures layer_types mlp_layer_types indexer_types",
        ("a list of whole numbers", _is_list_of(int)): """
            mlp_only_layers full_attn_idxs compress_ratios eagle_aux_hidden_state_layer_ids ple_layer_ids""",
        ("a list of numbers", _is_list_of(int, float)): "long_factor short_factor",
        ("a JSON object", lambda value: isinstance(value, dict)): """
            text_config rope_parameters rope_scaling full_attention sliding_attention sentence_transformers
            main compress compress_rates eagle_config dflash_config transformer_layer_config id2label""",
    }
)
KINDS: Mapping[str, Kind] = MappingProxyType({name: kind for kind, names in _NAMES.items() for name in names.split()})


def is_truth(name: str) -> bool:
    """Return whether a configuration key is a boolean. False for an unknown key."""
    return name in KINDS and KINDS[name][0] == _TRUTH


def check_values(file: Path, values: Mapping[str, Any], words: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise `ConfigError` for a value of the wrong type, also in nested objects. `file` is only
    named in the error. `words`: one architecture's entry of `config_synonyms.WORDS`, so that its
    own keys have the types of the common ones. Null counts as no value, and unknown keys are
    ignored."""
    for name, value in values.items():
        kind = KINDS.get(name) or KINDS.get(words.get(name, ""))
        if kind is None or value is None:
            continue
        if not kind[1](value):
            raise ConfigError(
                f"{file} has {name} = {value!r:.60}", wanted=kind[0], remedy="download the checkpoint again"
            )
        if isinstance(value, dict):
            check_values(file, value)
