"""Sizes of a model's layers for cost estimates: weights to read, cache to keep, operations; counted
from the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglcore.checkpoint.gguf_header import is_gguf
from sglcore.checkpoint.model_config import ModelConfig
from sglcore.checkpoint.quantization_config import has_mxfp4_experts, read_quantization
from sglcore.core.errors import ConfigError

UNKNOWN = (
    "linear_num_key_heads",
    "mamba_n_heads",
    "mamba_num_heads",
    "conv_L_cache",
    "o_groups",
    "index_topk",
)
"""Configuration keys of layers with recurrent state or sparse attention. A model that has one is
refused, because the costs of these layers are unknown here."""
MXFP4 = 17 / 32
"""Bytes of a 4-bit float, with its share of an 8-bit scale for 32 of them."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of one layer, in elements unless said, which `shape_of` counts: attention weights
    and KV cache elements of a token by how ranks divide them, operations of a score, the sliding
    window, and the weights of the dense block and of one expert."""

    whole: int
    """Attention weights that every rank has, and the router of experts."""
    by_heads: int
    """Attention weights that are divided among ranks by query heads."""
    by_keys: int
    """Attention weights that are divided among ranks by key heads, up to the number of key
    heads."""
    cache_whole: int
    """KV cache elements of a token that every rank keeps."""
    cache_by_keys: int
    """KV cache elements of a token that are divided among ranks by key heads."""
    score_flops: int
    """Floating-point operations of a query for each token that it sees, over all heads."""
    window: int | None
    """The sliding window in tokens. None: full attention."""
    block: int
    """Dense weights that every row uses, divided among all ranks."""
    num_blocks: int
    """Number of dense blocks in the layer, 0 or 1."""
    expert: int
    """Weights of one expert. 0: the layer has no experts."""

    def seen(self, length: int) -> int:
        """Return how many of `length` tokens the next token sees."""
        return length if self.window is None else min(length, self.window)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model, from its configuration; `shape_of` makes it: those of each layer, the
    hidden size, vocabulary, heads and experts, and the bytes of an element of each kind of
    weight."""

    layers: tuple[LayerShape, ...]
    """The sizes of each layer, in order."""
    hidden: int
    """Elements of a hidden state."""
    vocabulary: int
    """Tokens in the vocabulary."""
    tables: int
    """Elements of the embedding and the output layer, of `row_bytes` each."""
    kv_heads: int
    """Number of key heads in a layer."""
    experts: int
    """Experts in a layer. 0: the model has none."""
    chosen: int
    """Experts that a token uses."""
    row_bytes: float
    """Bytes of an element of hidden states and KV cache."""
    attention_bytes: float
    """Bytes of an element of attention's weights."""
    block_bytes: float
    """Bytes of an element of dense blocks' weights."""
    expert_bytes: float
    """Bytes of an element of experts' weights."""

    @property
    def parameters(self) -> int:
        """Number of weights of all layers, experts, embedding and output layer, without norms and
        biases."""
        each = (
            layer.whole + layer.by_heads + layer.by_keys + layer.block + layer.expert * self.experts
            for layer in self.layers
        )
        return sum(each) + self.tables


def shape_of(config: ModelConfig) -> ModelShape:
    """Return the shape of a checkpoint's model.

    Raises ConfigError if the costs of its layers are unknown.
    """
    _check(config)
    layers = range(config.num_hidden_layers)
    dense = next((layer for layer in layers if not _is_sparse(config, layer)), config.num_hidden_layers - 1)
    row_bytes = 4.0 if config.dtype == "float32" else 2.0
    at = config.num_hidden_layers - 1
    experts = MXFP4 if has_mxfp4_experts(config.raw) else _bytes(config, f"layers.{at}.mlp.experts.0.down_proj")
    return ModelShape(
        layers=tuple(_layer(config, layer) for layer in layers),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        tables=config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2),
        kv_heads=config.num_key_value_heads,
        experts=config.moe.num_experts if config.moe else 0,
        chosen=config.moe.experts_per_token if config.moe else 0,
        row_bytes=row_bytes,
        attention_bytes=_bytes(config, f"layers.{at}.self_attn.o_proj"),
        block_bytes=_bytes(config, f"layers.{dense}.mlp.down_proj"),
        expert_bytes=experts,
    )


def _check(config: ModelConfig) -> None:
    found = next((word for word in UNKNOWN if config.words.get(word)), None)
    if is_gguf(config.path):
        found = "a GGUF file, in which each tensor has its own type"
    if config.is_encoder:
        found = "an encoder, which has no KV cache"
    if found:
        raise ConfigError(
            f"{config.path} has {found}, and its costs are not known here",
            wanted="a checkpoint folder of a decoder with plain or latent attention in every layer",
            remedy="measure the layouts with `sglcore bench offline`",
        )


def _bytes(config: ModelConfig, module: str) -> float:
    """Return the bytes per element of the weight of linear layer `module` (its name below
    "model."), as the quantization says, without scales; unquantized: 4 for float32, else 2."""
    quantization = read_quantization(config.raw)
    scheme = None if quantization is None else quantization.scheme(f"model.{module}")
    if scheme is not None:
        return scheme.bits / 8
    return 4.0 if config.dtype == "float32" else 2.0


def _is_sparse(config: ModelConfig, layer: int) -> bool:
    return config.moe is not None and config.moe.layers[layer]


def _layer(config: ModelConfig, layer: int) -> LayerShape:
    hidden, moe = config.hidden_size, config.moe
    attention = _latent(config) if "kv_lora_rank" in config.words else _plain(config)
    window = config.sliding_windows[layer]
    if moe is None or not moe.layers[layer]:
        block = 3 * hidden * config.intermediate_size
        return LayerShape(**attention, window=window, block=block, num_blocks=1, expert=0)
    attention["whole"] += hidden * moe.num_experts  # the router
    shared = 3 * hidden * moe.shared_size
    expert = 3 * hidden * moe.intermediate_size
    return LayerShape(**attention, window=window, block=shared, num_blocks=1 if shared else 0, expert=expert)


def _plain(config: ModelConfig) -> dict[str, Any]:
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "whole": 0,
        "by_heads": 2 * config.hidden_size * heads,
        "by_keys": 2 * config.hidden_size * keys,
        "cache_whole": 0,
        "cache_by_keys": 2 * keys,
        "score_flops": 4 * heads,
    }


def _latent(config: ModelConfig) -> dict[str, Any]:
    """Return the sizes of multi-head latent attention, with keys and values absorbed into queries
    and outputs (DeepSeek-V2, section 2.1), by the names of the fields of `LayerShape`."""
    words, hidden, heads = config.words, config.hidden_size, config.num_attention_heads
    kv, rope, nope, value = (
        words[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    q_rank = words.get("q_lora_rank", 0)
    queries = (q_rank or hidden) * heads * (nope + rope)
    return {
        "whole": hidden * (q_rank + kv + rope),
        "by_heads": queries + kv * heads * (nope + value) + heads * value * hidden,
        "by_keys": 0,
        "cache_whole": kv + rope,
        "cache_by_keys": 0,
        "score_flops": 2 * heads * (2 * kv + rope),
    }
