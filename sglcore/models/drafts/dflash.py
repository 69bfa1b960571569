"""DFlash (arXiv 2602.06036): drafts a block of tokens in one forward.

The draft attends to the target's hidden states, from some of its layers, of all tokens before. The
KV slots hold keys and values of these features only. Tokens of a block also attend to each other.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, cast

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.models.architectures.llama import LlamaForCausalLM
from sglcore.models.decoder import AnyLayer, DecoderLayer, LayerState, SelfAttention
from sglcore.models.drafts.draft_checkpoint import DraftCheckpoint, Shapes, unfit
from sglcore.models.drafts.eagle import Drafts
from sglcore.models.layer_kinds import Architecture, Array, Attention, Batch, Build


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
    """A DFlash draft. Tokens before a block reach it only by `inject`. The tokens of a batch are
    blocks: a root and then mask tokens.

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


def is_dflash(names: Collection[str]) -> bool:
    """Return whether tensors of these names are a DFlash draft."""
    return "fc.weight" in names and "hidden_norm.weight" in names


def dflash_words(config: ModelConfig, shapes: Shapes, target: Architecture) -> dict[str, Any]:
    """Return further entries for the configuration's `words`, which `DFlashDraftModel` reads:
    `aux_layers`, `block_size`, `mask_token_id` and `target_hidden_size`.

    Raises ConfigError for sliding-window layers and for a draft that does not fit the target.
    """
    own, folder, layers = config.words.get("dflash_config", {}), config.path, target.config.num_hidden_layers
    if any(each is not None for each in config.sliding_windows):
        unfit(folder, "layer_types", config.words.get("layer_types"), "'full_attention' alone")
    block, mask = config.words.get("block_size"), own.get("mask_token_id")
    if not isinstance(block, int) or block < 2:
        unfit(folder, "block_size", block, "2 or more")
    if not isinstance(mask, int) or not 0 <= mask < target.config.vocab_size:
        unfit(folder, "dflash_config.mask_token_id", mask, f"a token id below {target.config.vocab_size}")
    ids, width = own.get("target_layer_ids"), target.feature_size
    count = shapes["fc.weight"][1] // width
    found = default_layers(count, layers) if ids is None else list(ids)
    if not found or found != sorted(found) or found[0] < 0 or found[-1] >= layers or len(found) != count:
        wanted = f"{count} ascending numbers of the model's {layers} layers, as fc.weight implies"
        unfit(folder, "dflash_config.target_layer_ids", found, wanted)
    aux_layers = tuple(each + 1 for each in found)
    return {"aux_layers": aux_layers, "block_size": block, "mask_token_id": mask, "target_hidden_size": width}


def default_layers(count: int, layers: int) -> list[int]:
    """Return the numbers, from 0, of the target's layers that a draft reads if its configuration
    names none: `count` of `layers`, evenly spaced from 1 to `layers` - 3; for one, `layers` // 2.
    """
    if count == 1:
        return [layers // 2]
    return [round(1 + each * (layers - 4) / (count - 1)) for each in range(count)]


CHECKPOINT = DraftCheckpoint("sglcore.models.drafts.dflash:DFlashDraftModel", is_dflash, dflash_words)
