"""DFlash (arXiv 2602.06036): drafts a block of tokens in one forward.

The draft attends to the target's hidden states, from some of its layers, of all tokens before. The
KV slots hold keys and values of these features only. Tokens of a block also attend to each other.
"""

from __future__ import annotations

from typing import Protocol, cast

from sglcore.models.architectures.llama import LlamaForCausalLM
from sglcore.models.decoder import AnyLayer, DecoderLayer, LayerState, SelfAttention
from sglcore.models.drafts.eagle import Drafts
from sglcore.models.layer_kinds import Array, Attention, Batch, Build


class Storing(Attention, Protocol):
    """Attention that can write KV slots without a query."""

    def store(self, kv: Array, batch: Batch, /) -> None:
        """Store keys and values in the KV slots of the batch's tokens.

        `kv` [T, 2 * kv_heads * head_dim]: keys before norm and rotary embedding, then values.
        """
        ...


class BlockAttention(SelfAttention):
    """Attention with a norm for each head, that can store keys and values without a query."""

    __slots__ = ("concat", "kv_proj", "q_proj")

    def __init__(self, build: Build, layer_id: int, rotary: Array, bias: bool) -> None:
        config = build.config
        size, inner = config.head_dim, config.num_attention_heads * config.head_dim
        rows = config.num_key_value_heads * size
        self.q_proj = build.linear("q_proj", config.hidden_size, inner, bias)
        self.kv_proj = build.fused((("k_proj", rows), ("v_proj", rows)), config.hidden_size, bias)
        self.concat = build.concat()
        self.attention = build.attention(layer_id, rotary, qk_norm=True)
        self.o_proj = build.linear("o_proj", inner, config.hidden_size, bias)

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        return self.o_proj(self.attention(self.concat(self.q_proj(hidden), self.kv_proj(hidden)), batch))

    def inject(self, features: Array, batch: Batch) -> None:
        """Store keys and values of features [T, H] in the KV slots of the batch's tokens."""
        cast("Storing", self.attention).store(self.kv_proj(features), batch)


class DFlashDraftModel(Drafts, LlamaForCausalLM):
    """A DFlash draft. The tokens of a batch are blocks: a root and then mask tokens.

    `words` of the configuration have `aux_layers`, `block_size`, `mask_token_id` and
    `target_hidden_size`, the width of the features of each layer.
    """

    layers: tuple[DecoderLayer, ...]

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        words, size, inner = build.config.words, build.config.hidden_size, build.at("model")
        self.aux_layers: tuple[int, ...] = words["aux_layers"]
        self.block_size: int = words["block_size"]
        self.mask_token_id: int = words["mask_token_id"]
        self.fc = inner.linear("fc", len(self.aux_layers) * words["target_hidden_size"], size)
        self.hidden_norm = inner.norm("hidden_norm", size)

    @classmethod
    def own_name(cls, name: str) -> str:
        """Rename copies of the embedding and the head to `target.*`: the target's own are used."""
        return f"target.{name}" if "embed_tokens" in name or "lm_head" in name else super().own_name(name)

    def make_layer(self, build: Build, layer_id: int) -> AnyLayer:
        config = build.config
        attention = BlockAttention(build.at("self_attn"), layer_id, self.rotary, config.attention_bias)
        return DecoderLayer(build, attention, build.mlp("mlp", config.intermediate_size, config.mlp_bias))

    def embed(self, batch: Batch) -> LayerState:
        """Return the first layer's input: the embedded tokens."""
        return LayerState(self.embed_tokens(batch.input_ids), None, batch)

    def project(self, features: Array) -> Array:
        """Return the features to inject [T, H], of [T, layers * target_hidden_size]."""
        return self.hidden_norm(self.fc(features))

    def inject(self, features: Array, batch: Batch) -> None:
        """Store every layer's keys and values of projected features [T, H].

        They go into the KV slots of the batch's tokens.
        """
        for layer in self.layers:
            mixer = layer.self_attn
            assert isinstance(mixer, BlockAttention)
            mixer.inject(features, batch)
