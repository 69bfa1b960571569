"""BERT as an encoder: hidden states of whole sequences, every token attending to all. No KV cache, no logits."""

from __future__ import annotations

import math
from typing import ClassVar

import mlx.core as mx

from sglcore.device.errors import ConfigError
from sglcore_mlx.layers.build import Build
from sglcore_mlx.layers.norm import LayerNorm
from sglcore_mlx.models.contract import Attend, layer_shapes


def gelu(x: mx.array) -> mx.array:
    """GELU (Hendrycks and Gimpel 2016), exact."""
    return x * (1 + mx.erf(x * math.sqrt(0.5))) * 0.5


class BertEmbeddings:
    """Word, segment and position embeddings, added and normalised. Every token is of the first segment."""

    def __init__(self, build: Build, eps: float) -> None:
        config, segments = build.config, build.config.raw.get("type_vocab_size", 2)
        size = config.hidden_size
        self.word_embeddings, _ = build.embedding("word_embeddings", config.vocab_size, size)
        self.position_embeddings, _ = build.embedding("position_embeddings", config.max_position_embeddings, size)
        self.token_type_embeddings, _ = build.embedding("token_type_embeddings", segments, size)
        self.norm = LayerNorm(build.at("LayerNorm"), size, eps)

    def __call__(self, ids: mx.array, positions: mx.array) -> mx.array:
        """int32 [T] and int32 [T] to [T, H]."""
        first_segment = self.token_type_embeddings(mx.zeros(1, dtype=mx.int32))
        return self.norm(self.word_embeddings(ids) + first_segment + self.position_embeddings(positions))


class BertLayer:
    """Attention and feed-forward, each followed by a residual sum and a norm."""

    def __init__(self, build: Build, layer_id: int, eps: float) -> None:
        config, size = build.config, build.config.hidden_size
        within, around = build.at("attention", "self"), build.at("attention", "output")
        self.qkv = within.fused([(name, size) for name in ("query", "key", "value")], size, bias=True)
        self.attention_dense = around.linear("dense", size, size, bias=True)
        self.attention_norm = LayerNorm(around.at("LayerNorm"), size, eps)
        self.intermediate = build.at("intermediate").linear("dense", size, config.intermediate_size, bias=True)
        self.output = build.at("output").linear("dense", config.intermediate_size, size, bias=True)
        self.output_norm = LayerNorm(build.at("output", "LayerNorm"), size, eps)
        self._heads = config.num_attention_heads
        self._layer_id = layer_id

    def __call__(self, hidden: mx.array, attend: Attend) -> mx.array:
        """[T, H] to [T, H]."""
        tokens, size = hidden.shape
        qkv = self.qkv(hidden).reshape(tokens, 3, self._heads, size // self._heads)
        attended = attend(self._layer_id, qkv[:, 0], qkv[:, 1], qkv[:, 2]).reshape(tokens, size)
        hidden = self.attention_norm(self.attention_dense(attended) + hidden)
        return self.output_norm(self.output(gelu(self.intermediate(hidden))) + hidden)


class BertModel:
    """The encoder alone: pooling is the worker's, and the heads of a checkpoint are left unread."""

    ignored: ClassVar[tuple[str, ...]] = (r"pooler\..*", r"cls\..*")
    stripped: ClassVar[str] = "bert."

    def __init__(self, build: Build) -> None:
        config = build.config
        if config.hidden_act != "gelu" or config.raw.get("position_embedding_type", "absolute") != "absolute":
            raise ConfigError("this BERT differs in its activation or positions", wanted="gelu and absolute positions")
        eps, layers = config.raw.get("layer_norm_eps", 1e-12), range(config.num_hidden_layers)
        self.config = config
        self.dtype = build.weights.dtype
        self.layers = layer_shapes(config)
        self._embeddings = BertEmbeddings(build.at("embeddings"), eps)
        self._blocks = tuple(BertLayer(build.at("encoder", "layer", index), index, eps) for index in layers)
        self.num_bytes = build.weights.num_bytes
        self.quantization = build.weights.forms

    def __call__(self, ids: mx.array, positions: mx.array, attend: Attend) -> mx.array:
        """int32 [T] and int32 [T] to the last hidden states [T, H]; `attend` is full attention inside each row."""
        hidden = self._embeddings(ids, positions)
        for block in self._blocks:
            hidden = block(hidden, attend)
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """There are none; raises `ConfigError`."""
        raise ConfigError(f"{self.config.architecture} is an encoder and has no logits", remedy="use its embeddings")
