"""ModernBERT (Warner et al. 2024): an encoder with rotary embedding, norms before each block, and
two-sided sliding windows."""

from __future__ import annotations

from typing import Any, ClassVar

from sglcore.core.errors import ConfigError
from sglcore.models.layer_kinds import Architecture, Array, Batch, Build


class ModernBertLayer:
    """Norm, attention, norm, feed-forward. In layer 0 the embedding's norm is the first norm."""

    def __init__(self, build: Build, layer_id: int, rotary: Any) -> None:
        config, size, within = build.config, build.config.hidden_size, build.at("attn")
        self.attn_norm = _norm(build, "attn_norm") if layer_id else None
        self.qkv = within.linear("Wqkv", size, 3 * size, config.attention_bias)
        self.attention = within.attention(layer_id, rotary, is_encoder=True)
        self.output = within.linear("Wo", size, size, config.attention_bias)
        self.mlp_norm = _norm(build, "mlp_norm")
        self.mlp = build.mlp("mlp", config.intermediate_size, config.mlp_bias, fused="gate_up_proj")

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        normed = hidden if self.attn_norm is None else self.attn_norm(hidden)
        hidden = hidden + self.output(self.attention(self.qkv(normed), batch))
        return hidden + self.mlp(self.mlp_norm(hidden))


class ModernBertHead:
    """The classification head: a linear layer, GELU and a norm, then the scores."""

    def __init__(self, build: Build, labels: int) -> None:
        head, size = build.at("head"), build.config.hidden_size
        self.dense = head.linear("dense", size, size, build.config.raw.get("classifier_bias", False))
        self.gelu, self.norm = build.activation("gelu"), _norm(head, "norm")
        self.scores = build.linear("classifier", size, labels, bias=True)

    def __call__(self, pooled: Array) -> Array:
        """[B, H] to [B, labels]."""
        return self.scores(self.norm(self.gelu(self.dense(pooled))))


class ModernBertModel(Architecture):
    """The encoder, with its classification head if it has labels."""

    ignored = (r"head\..*", r"decoder\..*")
    stripped: ClassVar[str] = "model."

    def __init__(self, build: Build) -> None:
        """Raise `ConfigError` for an activation other than gelu."""
        super().__init__(build)
        config, raw = build.config, build.config.raw
        for name in ("hidden_activation", "classifier_activation"):
            if raw.get(name, "gelu") != "gelu":
                raise ConfigError(f"this ModernBERT has {name} {raw[name]!r}", wanted="'gelu'")
        embeddings, local = build.at("embeddings"), config.local_rope
        rotary = build.rotary()
        local_rotary = rotary if local is None else build.rotary(local)
        self.tok_embeddings = embeddings.embedding("tok_embeddings", config.vocab_size, config.hidden_size)
        self.norm = _norm(embeddings, "norm")
        self.layers = tuple(
            ModernBertLayer(build.at("layers", index), index, rotary if window is None else local_rotary)
            for index, window in enumerate(config.sliding_windows)
        )
        self.final_norm = _norm(build, "final_norm")
        self.attention_layers = tuple(layer.attention.layer for layer in self.layers)
        labels = 0 if config.pooling is None else config.pooling.labels
        self.head = ModernBertHead(build, labels) if labels else None

    @classmethod
    def own_name(cls, name: str) -> str:
        """Remove the prefix `model.`, and map the names of the feed-forward block to those of other
        models.
        """
        name = super().own_name(name)
        return name.replace(".mlp.Wi.", ".mlp.gate_up_proj.").replace(".mlp.Wo.", ".mlp.down_proj.")

    def __call__(self, batch: Batch) -> Array:
        """T tokens to the last hidden states [T, H]."""
        hidden = self.norm(self.tok_embeddings.embed(batch))
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return self.final_norm(hidden)

    def classify(self, pooled: Array) -> Array:
        """[B, H] to [B, labels]; raises `ConfigError` for a configuration without labels."""
        return super().classify(pooled) if self.head is None else self.head(pooled)


def _norm(build: Build, name: str) -> Any:
    config = build.config
    return build.layer_norm(
        name, config.hidden_size, config.raw.get("norm_eps", 1e-5), config.raw.get("norm_bias", False)
    )
