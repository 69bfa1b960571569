"""DFlash (arXiv 2602.06036): a block of tokens at once, from what a target model made in some of its layers of all tokens before.

Cells hold keys and values of the target's features alone; a block's own rows see each other and those cells.
"""

from __future__ import annotations

from typing import Protocol, cast

from sglcore.models.build import Array, Attention, Batch, Build
from sglcore.models.decoder import AnyLayer, DecoderLayer, LayerState, SelfAttention
from sglcore.models.eagle import Drafts
from sglcore.models.llama import LlamaForCausalLM


class Storing(Attention, Protocol):
    """Attention whose cells may be written without a query."""

    def store(self, kv: Array, batch: Batch, /) -> None:
        """Keys, neither normed nor turned, and values side by side, [T, 2 * kv_heads * head_dim], into the cells of the batch's tokens."""
        ...


class BlockAttention(SelfAttention):
    """Attention with a norm of each head, whose keys and values may be stored without a query."""

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
        """Store keys and values of features [T, H] in the cells of the batch's tokens."""
        cast("Storing", self.attention).store(self.kv_proj(features), batch)


class DFlashDraftModel(Drafts, LlamaForCausalLM):
    """Called with the rows of blocks: a root and masks. The words of the configuration have `aux_layers`, `block_size` and
    `mask_token_id`, and `target_hidden_size`, how wide each of the streams is."""

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
        """Embedding and output layer are the target's, whatever copies the file has."""
        return f"target.{name}" if "embed_tokens" in name or "lm_head" in name else super().own_name(name)

    def make_layer(self, build: Build, layer_id: int) -> AnyLayer:
        config = build.config
        attention = BlockAttention(build.at("self_attn"), layer_id, self.rotary, config.attention_bias)
        return DecoderLayer(build, attention, build.mlp("mlp", config.intermediate_size, config.mlp_bias))

    def embed(self, batch: Batch) -> LayerState:
        """The tokens alone."""
        return LayerState(self.embed_tokens(batch.input_ids), None, batch)

    def project(self, features: Array) -> Array:
        """[T, layers * target_hidden_size] to what is injected, [T, H]."""
        return self.hidden_norm(self.fc(features))

    def inject(self, features: Array, batch: Batch) -> None:
        """Store what every layer makes of projected features [T, H] in the cells of the batch's tokens."""
        for layer in self.layers:
            mixer = layer.self_attn
            assert isinstance(mixer, BlockAttention)
            mixer.inject(features, batch)
