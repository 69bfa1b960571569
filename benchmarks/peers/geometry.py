"""The model that every engine runs: the geometry of Qwen3-0.6B. Standard library only, because
every engine's environment imports it."""

from __future__ import annotations

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40_960,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""The content of `config.json`."""

VOCABULARY, HIDDEN, INNER, LAYERS = 151_936, 1024, 3072, 28
HEADS, KV_HEADS, HEAD = 16, 8, 128

LAYER_PARAMETERS = HIDDEN * HEAD * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER
"""Weights of one layer's matrices: q, k, v, output, and the three of the MLP."""

BODY_PARAMETERS = LAYERS * LAYER_PARAMETERS
HEAD_PARAMETERS = VOCABULARY * HIDDEN
"""Weights of the tied embedding; computing logits reads all of them once."""

CACHE_BYTES = LAYERS * 2 * KV_HEADS * HEAD * 2
"""Bytes of keys and values of one token at 16 bits."""

INT8_CACHE_BYTES = LAYERS * 2 * KV_HEADS * (HEAD + 4)
"""The same at 8 bits, with a 32-bit scale for each head."""


def tensors() -> list[tuple[str, tuple[int, ...]]]:
    """Return the checkpoint name and shape of every tensor, in the order of the file."""
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN))]
    for layer in range(LAYERS):
        found += [(f"model.layers.{layer}.{name}", shape) for name, shape in _layer().items()]
    return [*found, ("model.norm.weight", (HIDDEN,))]


def _layer() -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.q_norm.weight": (HEAD,),
        "self_attn.k_norm.weight": (HEAD,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
