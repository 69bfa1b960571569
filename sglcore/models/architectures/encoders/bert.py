"""BERT as an encoder: hidden states of whole sequences, in which every token attends to all, and
the classification head."""

from __future__ import annotations

from typing import ClassVar

from sglcore.checkpoint.encoder_config import whole_number
from sglcore.core.errors import ConfigError
from sglcore.models.layer_kinds import Architecture, Array, Batch, Build, Layer


class BertEmbeddings:
    """Word, segment and position embeddings, added and normalised. Without `token_type_ids`, all
    tokens belong to the first segment."""

    def __init__(self, build: Build, eps: float) -> None:
        config, segments = build.config, whole_number(build.config.raw, "type_vocab_size", 2)
        size = config.hidden_size
        self.segments, self.first_position = segments, config.first_position
        self.word_embeddings = build.embedding("word_embeddings", config.vocab_size, size)
        self.position_embeddings = build.embedding("position_embeddings", config.max_position_embeddings, size)
        self.token_type_embeddings = build.embedding("token_type_embeddings", segments, size)
        self.norm = build.layer_norm("LayerNorm", size, eps)

    def __call__(self, batch: Batch) -> Array:
        """T tokens to [T, H]."""
        types, table = batch.token_type_ids, self.token_type_embeddings
        segments = table.row(0) if types is None or self.segments == 1 else table(types)
        positions = batch.positions + self.first_position if self.first_position else batch.positions
        return self.norm(self.word_embeddings.embed(batch) + segments + self.position_embeddings(positions))


class BertLayer:
    """Attention and feed-forward, each followed by a residual sum and a norm."""

    def __init__(self, build: Build, layer_id: int, eps: float) -> None:
        config, size = build.config, build.config.hidden_size
        within, around, output = build.at("attention", "self"), build.at("attention", "output"), build.at("output")
        self.qkv = within.fused([(name, size) for name in ("query", "key", "value")], size, bias=True)
        self.attention = within.attention(layer_id, is_encoder=True)
        self.attention_dense = around.linear("dense", size, size, bias=True)
        self.attention_norm = around.layer_norm("LayerNorm", size, eps)
        self.intermediate = build.at("intermediate").linear("dense", size, config.intermediate_size, bias=True)
        self.gelu = build.activation("gelu")
        self.output = output.linear("dense", config.intermediate_size, size, bias=True)
        self.output_norm = output.layer_norm("LayerNorm", size, eps)

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        attended = self.attention_dense(self.attention(self.qkv(hidden), batch))
        hidden = self.attention_norm(attended + hidden)
        return self.output_norm(self.output(self.gelu(self.intermediate(hidden))) + hidden)


class ScoreHead:
    """A dense layer with tanh, and a linear layer that scores the labels."""

    def __init__(self, dense: Layer, tanh: Layer, scores: Layer) -> None:
        self.dense, self.tanh, self.scores = dense, tanh, scores

    def __call__(self, pooled: Array) -> Array:
        """[B, H] to [B, labels]."""
        return self.scores(self.tanh(self.dense(pooled)))


class BertModel(Architecture):
    """The encoder, with its classification head if it has labels; other heads of a checkpoint are
    not read."""

    ignored = (r"pooler\..*", r"cls\..*")
    stripped: ClassVar[str] = "bert."

    def __init__(self, build: Build) -> None:
        """Raise `ConfigError` for an activation other than gelu, or positions other than absolute
        ones."""
        super().__init__(build)
        config = build.config
        if config.hidden_act != "gelu" or config.words.get("position_embedding_type", "absolute") != "absolute":
            raise ConfigError("this BERT differs in its activation or positions", wanted="gelu and absolute positions")
        eps, layers = config.words.get("layer_norm_eps", 1e-12), range(config.num_hidden_layers)
        self.embeddings = BertEmbeddings(build.at("embeddings"), eps)
        self.layers = tuple(BertLayer(build.at("encoder", "layer", index), index, eps) for index in layers)
        self.attention_layers = tuple(layer.attention.layer for layer in self.layers)
        labels = 0 if config.pooling is None else config.pooling.labels
        self.head = self.make_head(build, labels) if labels else None

    def make_head(self, build: Build, labels: int) -> ScoreHead:
        """Return the classification head: the checkpoint's pooler and the scores."""
        size = self.config.hidden_size
        dense = build.at("pooler").linear("dense", size, size, bias=True)
        return ScoreHead(dense, build.activation("tanh"), build.linear("classifier", size, labels, bias=True))

    def __call__(self, batch: Batch) -> Array:
        """T tokens to the last hidden states [T, H]."""
        hidden = self.embeddings(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return hidden

    def classify(self, pooled: Array) -> Array:
        """[B, H] to [B, labels]; raises `ConfigError` without a classification head."""
        return super().classify(pooled) if self.head is None else self.head(pooled)
