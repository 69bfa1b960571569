"""BERT as an encoder: hidden states of whole sequences, every token attending to all. No KV cache, no logits."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sglcore.device.errors import ConfigError
from sglcore.layers.attention import Attention
from sglcore.layers.build import Build
from sglcore.layers.linear import Embedding, FusedLinear, Linear, embed
from sglcore.layers.norm import LayerNorm
from sglcore.runtime.forward_batch import ForwardBatch


class BertEmbeddings:
    """Word, segment and position embeddings, added and normalised. Every token is of the first segment."""

    def __init__(self, build: Build) -> None:
        config, eps = build.config, build.config.raw.get("layer_norm_eps", 1e-12)
        size, segments = config.hidden_size, config.raw.get("type_vocab_size", 2)
        self.word_embeddings = Embedding(build.at("word_embeddings"), config.vocab_size, size)
        self.position_embeddings = Embedding(build.at("position_embeddings"), config.max_position_embeddings, size)
        self.token_type_embeddings = Embedding(build.at("token_type_embeddings"), segments, size)
        self.norm = LayerNorm(build.at("LayerNorm"), size, eps)

    def __call__(self, ids: Tensor | None, positions: Tensor | None, embeds: Tensor | None) -> Tensor:
        """int [T] twice to [T, H]; `embeds` [T, H] takes the place of the words' embeddings."""
        assert positions is not None
        words = embed(self.word_embeddings, ids, embeds)
        hidden = words + self.token_type_embeddings.weight[0]
        return self.norm(hidden + self.position_embeddings(positions))


class BertLayer:
    """Attention and feed-forward, each followed by a residual sum and a norm."""

    def __init__(self, build: Build, layer_id: int) -> None:
        config, eps = build.config, build.config.raw.get("layer_norm_eps", 1e-12)
        size, heads = config.hidden_size, config.num_attention_heads
        within, around = build.at("attention", "self"), build.at("attention", "output")
        self.qkv = FusedLinear(within, size, [(name, size) for name in ("query", "key", "value")], bias=True)
        self.attention = Attention(layer_id, heads, heads, size // heads, causal=False, cached=False)
        self.attention_dense = Linear(around.at("dense"), size, size, bias=True)
        self.attention_norm = LayerNorm(around.at("LayerNorm"), size, eps)
        self.intermediate = Linear(build.at("intermediate", "dense"), size, config.intermediate_size, bias=True)
        self.output = Linear(build.at("output", "dense"), config.intermediate_size, size, bias=True)
        self.output_norm = LayerNorm(build.at("output", "LayerNorm"), size, eps)
        self._gelu = build.kernels.gelu
        self._size = size

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        q, k, v = self.qkv(hidden).split(self._size, dim=-1)
        hidden = self.attention_norm(self.attention_dense(self.attention(q, k, v)) + hidden)
        return self.output_norm(self.output(self._gelu(self.intermediate(hidden))) + hidden)


class BertModel:
    """The encoder alone: pooling is the runner's, and the heads of a checkpoint are left unread."""

    ignored: ClassVar[tuple[str, ...]] = (r"pooler\..*", r"cls\..*")
    stripped: ClassVar[str] = "bert."

    def __init__(self, build: Build) -> None:
        config = build.config
        if config.hidden_act != "gelu" or config.raw.get("position_embedding_type", "absolute") != "absolute":
            raise ConfigError("this BERT differs in its activation or positions", wanted="gelu and absolute positions")
        self.config = config
        self.weights = build.weights
        self.dtype = build.weights.dtype
        self.kernels = build.kernels
        self.embeddings = BertEmbeddings(build.at("embeddings"))
        layers = range(config.num_hidden_layers)
        self.layers = tuple(BertLayer(build.at("encoder", "layer", index), index) for index in layers)
        self.attention_layers = tuple(layer.attention for layer in self.layers)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """T tokens to the last hidden states [T, H]."""
        hidden = self.embeddings(batch.input_ids, batch.positions, batch.input_embeds)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """There are none; raises `ConfigError`."""
        raise ConfigError(f"{self.config.architecture} is an encoder and has no logits", remedy="use its embeddings")
