"""The architectures of GGUF files: the safetensors names of their tensors, and the metadata that
only they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sglcore.checkpoint.gguf_header import GgufHeader

NONE: Mapping[str, Any] = MappingProxyType({})
SPARSE_LLAMA = "llama with experts"
"""Our key for files with experts that also say "llama"."""
COMMON: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
"""The tensors of a block: GGUF name -> checkpoint name."""
_EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    }
)
_SHARED: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
_MIXTRAL: Mapping[str, str] = MappingProxyType(
    {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    }
)
_SANDWICH: Mapping[str, str] = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_GLM4: Mapping[str, str] = MappingProxyType(
    {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    }
)
_PHI3: Mapping[str, str] = MappingProxyType({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})


class GgufArchitecture(NamedTuple):
    """How to translate a GGUF architecture to a `config.json` and its tensor names.

    - `name`: the architecture's name in a `config.json`.
    - `parts`: tensors of a block in addition to `COMMON` or in place of its entries.
    - `is_paired`: GGUF stores the two elements of a rotated pair next to each other; the
      safetensors checkpoint of the same model stores them half a head apart.
    - `words`: metadata keys below the architecture's name, and their names in a `config.json`.
    - `more`: called with the header and the words found so far; returns words to add or replace.
    """

    name: str
    parts: Mapping[str, str] = NONE
    is_paired: bool = False
    words: Mapping[str, str] = NONE
    more: Callable[[GgufHeader, Mapping[str, Any]], Mapping[str, Any]] = lambda header, config: NONE


def _gemma(layers: int) -> Callable[[GgufHeader, Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function `more` for the query scale, `query_pre_attn_scalar`, which no metadata has:
    the head size, but hidden size / query heads for the largest model, which has `layers` layers.
    That function also gives files without a window the early files' 4096.
    """

    def more(header: GgufHeader, config: Mapping[str, Any]) -> Mapping[str, Any]:
        mean = config["hidden_size"] // config["num_attention_heads"]
        scalar = mean if config["num_hidden_layers"] == layers else config["head_dim"]
        return {"query_pre_attn_scalar": scalar, "sliding_window": config["sliding_window"] or 4096}

    return more


def _olmo(header: GgufHeader, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the words of OLMo 3 if there is a sliding window; none otherwise.

    Its sliding-window layers have the same rotary base as the others.
    """
    if not config["sliding_window"]:
        return NONE
    return {"architectures": ["Olmo3ForCausalLM"], "rope_local_base_freq": config["rope_parameters"]["rope_theta"]}


_WINDOW: Mapping[str, str] = MappingProxyType({"attention.sliding_window": "sliding_window"})
_CAPS: Mapping[str, str] = MappingProxyType(
    {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
)
_SPARSE: Mapping[str, str] = MappingProxyType(
    {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
)
ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture("LlamaForCausalLM", is_paired=True),
        SPARSE_LLAMA: GgufArchitecture(
            "MixtralForCausalLM",
            _MIXTRAL,
            is_paired=True,
            words={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        ),
        "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
        "qwen2moe": GgufArchitecture(
            "Qwen2MoeForCausalLM",
            {**_EXPERTS, **_SHARED},
            words={**_SPARSE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        ),
        "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
        "qwen3moe": GgufArchitecture(
            "Qwen3MoeForCausalLM", _EXPERTS, words=_SPARSE, more=lambda header, config: {"norm_topk_prob": True}
        ),
        "gemma": GgufArchitecture("GemmaForCausalLM"),
        "gemma2": GgufArchitecture("Gemma2ForCausalLM", _SANDWICH, words={**_WINDOW, **_CAPS}, more=_gemma(46)),
        "gemma3": GgufArchitecture(
            "Gemma3ForCausalLM",
            _SANDWICH,
            words={**_WINDOW, **_CAPS, "rope.freq_base_swa": "rope_local_base_freq"},
            more=_gemma(62),
        ),
        "phi3": GgufArchitecture("Phi3ForCausalLM", _PHI3, words=_WINDOW),
        "glm4": GgufArchitecture("Glm4ForCausalLM", _GLM4),
        "granite": GgufArchitecture(
            "GraniteForCausalLM",
            is_paired=True,
            words={
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
        ),
        "olmo2": GgufArchitecture("Olmo2ForCausalLM", _SANDWICH, words=_WINDOW, more=_olmo),
    }
)
"""`general.architecture` -> the same architecture in a `config.json`."""


def architecture_name(header: GgufHeader) -> str:
    """Return the file's `general.architecture`, or SPARSE_LLAMA for a "llama" with experts: the key
    in `ARCHITECTURES`, if the architecture is supported. Raises `CheckpointError` for a file
    without a name.
    """
    name = header.need("general.architecture", str)
    return SPARSE_LLAMA if name == "llama" and header.metadata.get("llama.expert_count") else name
