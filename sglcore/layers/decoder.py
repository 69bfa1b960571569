"""Decoder-only language models: self-attention, the layer, and the model around its layers.

An architecture's file subclasses `CausalLM` and says in `make_layer` what is its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from sglcore.device.errors import ConfigError
from sglcore.layers.attention import Attention
from sglcore.layers.build import Build
from sglcore.layers.linear import Embedding, FusedLinear, Head, Linear, embed
from sglcore.layers.norm import RMSNorm
from sglcore.layers.rotary import cos_sin_cache
from sglcore.runtime.forward_batch import ForwardBatch


class LayerState(NamedTuple):
    """What one layer hands to the next: its output [T, H], the sum [T, H] to which it is not yet added (None before the
    first), and the batch."""

    hidden: Tensor
    residual: Tensor | None
    batch: ForwardBatch


class SelfAttention:
    """Projections, optional norms of each query and key head, rotary embedding, attention."""

    __slots__ = (
        "_cos_sin",
        "_head_dim",
        "_norm_rotary_and_store",
        "_rotary",
        "_rotary_and_store",
        "_sizes",
        "_stores",
        "attention",
        "k_norm",
        "o_proj",
        "q_norm",
        "qkv_proj",
    )

    def __init__(
        self,
        build: Build,
        layer_id: int,
        cos_sin: Tensor,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        """`cos_sin` is what `cos_sin_cache` gives."""
        config = build.config
        size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self._sizes = [heads * size, kv_heads * size, kv_heads * size]
        parts = tuple(zip(("q_proj", "k_proj", "v_proj"), self._sizes, strict=True))
        self.qkv_proj = FusedLinear(build, config.hidden_size, parts, qkv_bias)
        self.q_norm = RMSNorm(build.at("q_norm"), size, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(build.at("k_norm"), size, config.rms_norm_eps) if qk_norm else None
        self.o_proj = Linear(build.at("o_proj"), heads * size, config.hidden_size, output_bias)
        self.attention = Attention(layer_id, heads, kv_heads, size, sliding_window=config.sliding_windows[layer_id])
        self._rotary = build.kernels.rotary
        self._rotary_and_store = build.kernels.rotary_and_store
        self._norm_rotary_and_store = build.kernels.norm_rotary_and_store if qk_norm else None
        self._stores = self._rotary_and_store is not None or self._norm_rotary_and_store is not None
        self._head_dim = size
        self._cos_sin = cos_sin

    def __call__(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, H] to [T, H]."""
        assert batch.positions is not None
        return self.o_proj(self.attention(*self._rotated(self.qkv_proj(hidden), batch.positions)))

    def _rotated(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, keys and values, each [T, heads * head_dim], at positions int [T]; keys and values are None if they are
        stored."""
        q, k, v = qkv.split(self._sizes, dim=-1)
        cells = self.attention.cells() if self._stores else None
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None:
            if self._norm_rotary_and_store is not None and cells is not None:
                norms = q_norm.weight, k_norm.weight, q_norm.eps
                stored = self._norm_rotary_and_store(q, k, v, positions, self._cos_sin, self._head_dim, *cells, *norms)
                return stored, None, None
            q, k = self._norm(q_norm, q), self._norm(k_norm, k)
        if self._rotary_and_store is not None and cells is not None:
            return self._rotary_and_store(q, k, v, positions, self._cos_sin, self._head_dim, *cells), None, None
        q, k = self._rotary(q, k, positions, self._cos_sin, self._head_dim)
        return q, k, v

    def _norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        tokens, width = x.shape
        return norm(x.view(tokens, width // self._head_dim, self._head_dim)).view(tokens, width)


class FeedForward(Protocol):
    """What follows attention in a layer."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        ...


class DecoderLayer:
    """Norm, attention, norm, feed-forward; each norm also adds to the sum what came before it."""

    __slots__ = ("input_layernorm", "mlp", "post_attention_layernorm", "self_attn")

    def __init__(self, build: Build, self_attn: SelfAttention, mlp: FeedForward) -> None:
        size, eps = build.config.hidden_size, build.config.rms_norm_eps
        self.input_layernorm = RMSNorm(build.at("input_layernorm"), size, eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(build.at("post_attention_layernorm"), size, eps)
        self.mlp = mlp

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """`hidden` and `residual` of a `LayerState`, both used up, to those of the next."""
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, batch)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class CausalLM(ABC):
    """Embedding, layers, norm and head. `embed`, `run_layers` over all layers in order, and `finish` are one forward."""

    ignored: ClassVar[tuple[str, ...]] = ()
    stripped: ClassVar[str] = ""

    def __init__(self, build: Build) -> None:
        config, inner = build.config, build.at("model")
        if config.hidden_act != "silu":
            raise ConfigError(f"hidden_act {config.hidden_act!r} is not supported here", wanted="'silu'")
        self.config = config
        self.weights = build.weights
        self.dtype = build.weights.dtype
        self.kernels = build.kernels
        self.embed_tokens = Embedding(inner.at("embed_tokens"), config.vocab_size, config.hidden_size)
        self.cos_sin = cos_sin_cache(config, build.max_positions, build.weights.device)
        self.layers = tuple(self.make_layer(inner.at("layers", i), i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(inner.at("norm"), config.hidden_size, config.rms_norm_eps)
        tied = self.embed_tokens if config.tie_word_embeddings else None
        self.head = Head(build.at("lm_head"), config.vocab_size, config.hidden_size, tied)
        self.attention_layers = tuple(layer.self_attn.attention for layer in self.layers)

    @property
    def lm_head(self) -> Tensor:
        """The output layer's weight [vocab, H]."""
        return self.head.weight

    @abstractmethod
    def make_layer(self, build: Build, layer_id: int) -> DecoderLayer:
        """One layer of this architecture."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """T tokens to hidden states [T, H] after the last norm."""
        return self.finish(self.run_layers(self.embed(batch), 0, len(self.layers)))

    def embed(self, batch: ForwardBatch) -> LayerState:
        """What the first layer starts from: the embedded tokens, or `input_embeds` in their place."""
        return LayerState(embed(self.embed_tokens, batch.input_ids, batch.input_embeds), None, batch)

    def run_layers(self, state: LayerState, first: int, last: int) -> LayerState:
        """The state after the layers first <= i < last; the one before is used up."""
        hidden, residual, batch = state
        for layer in self.layers[first:last]:
            hidden, residual = layer(hidden, residual, batch)
        return LayerState(hidden, residual, batch)

    def finish(self, state: LayerState) -> Tensor:
        """The last norm, over what the last layer left."""
        return self.norm.add(state.hidden, state.residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] to float32 [N, vocab]."""
        return self.head(hidden)
