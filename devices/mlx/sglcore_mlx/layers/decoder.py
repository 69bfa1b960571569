"""Decoder-only language models: self-attention, the layer, and the model around its layers.

An architecture's file subclasses `CausalLM` and says in `make_layer` what is its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import mlx.core as mx

from sglcore.device.errors import ConfigError
from sglcore_mlx.layers.build import Build
from sglcore_mlx.layers.linear import Linear
from sglcore_mlx.layers.norm import HeadNorm, RMSNorm
from sglcore_mlx.layers.rotary import Rotary, Rotate
from sglcore_mlx.models.contract import Attend, layer_shapes


class SelfAttention:
    """Projections, optional norms of each query and key head, rotary embedding, attention."""

    __slots__ = ("_counts", "_head_dim", "_layer_id", "_norm", "o_proj", "qkv_proj")

    def __init__(
        self, build: Build, layer_id: int, qkv_bias: bool = False, output_bias: bool = False, qk_norm: bool = False
    ) -> None:
        config = build.config
        size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        names = (("q_proj", heads * size), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size))
        self.qkv_proj = build.fused(names, config.hidden_size, qkv_bias)
        self.o_proj = build.linear("o_proj", heads * size, config.hidden_size, output_bias)
        self._norm = HeadNorm(build) if qk_norm else None
        self._counts = (heads, kv_heads)
        self._head_dim = size
        self._layer_id = layer_id

    def __call__(self, hidden: mx.array, rotate: Rotate, attend: Attend) -> mx.array:
        """[T, H] to [T, H]."""
        (heads, kv_heads), tokens = self._counts, hidden.shape[0]
        qkv = self.qkv_proj(hidden).reshape(tokens, heads + 2 * kv_heads, self._head_dim)
        rotated = heads + kv_heads
        qk = rotate(qkv if self._norm is None else self._norm(qkv[:, :rotated]), rotated)
        attended = attend(self._layer_id, qk[:, :heads], qk[:, heads:], qkv[:, rotated:])
        return self.o_proj(attended.reshape(tokens, heads * self._head_dim))


class FeedForward(Protocol):
    """What follows attention in a layer."""

    def __call__(self, hidden: mx.array) -> mx.array:
        """[T, H] to [T, H]."""
        ...


class DecoderLayer:
    """Norm and attention, norm and feed-forward block, each added to what came in."""

    __slots__ = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")

    def __init__(self, build: Build, self_attn: SelfAttention, mlp: FeedForward) -> None:
        size, eps = build.config.hidden_size, build.config.rms_norm_eps
        self.input_layernorm = RMSNorm(build.at("input_layernorm"), size, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(build.at("post_attention_layernorm"), size, eps)
        self.mlp = mlp

    def __call__(self, hidden: mx.array, rotate: Rotate, attend: Attend) -> mx.array:
        """[T, H] to [T, H]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotate, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class CausalLM(ABC):
    """Embedding, layers, norm and head; see `models.contract.Model`. `num_bytes` and `quantization` are those of the
    weights that were asked for."""

    ignored: ClassVar[tuple[str, ...]] = ()
    stripped: ClassVar[str] = ""

    def __init__(self, build: Build) -> None:
        config, inner = build.config, build.at("model")
        if config.hidden_act != "silu":
            raise ConfigError(f"hidden_act {config.hidden_act!r} is not supported here", wanted="'silu'")
        self.config = config
        self.dtype = build.weights.dtype
        self.layers = layer_shapes(config)
        self._rotary = Rotary(config, build.max_positions, self.dtype, build.parts.fused_rotary)
        self._embed, tied = inner.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self._blocks = tuple(self.make_layer(inner.at("layers", i), i) for i in range(config.num_hidden_layers))
        self._norm = RMSNorm(inner.at("norm"), config.hidden_size, config.rms_norm_eps)
        self._head = tied if config.tie_word_embeddings else self._make_head(build)
        self.num_bytes = build.weights.num_bytes
        self.quantization = build.weights.forms

    @abstractmethod
    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        """One layer of this architecture."""

    def __call__(self, ids: mx.array, positions: mx.array, attend: Attend) -> mx.array:
        """int32 [T] and int32 [T] to hidden states [T, H] after the last norm."""
        rotate, hidden = self._rotary.at(positions), self._embed(ids)
        for block in self._blocks:
            hidden = block(hidden, rotate, attend)
        return self._norm(hidden)

    def logits(self, hidden: mx.array) -> mx.array:
        """[N, H] to float32 [N, V]."""
        return self._head(hidden).astype(mx.float32)

    def _make_head(self, build: Build) -> Linear:
        return build.linear("lm_head", build.config.hidden_size, build.config.vocab_size)
