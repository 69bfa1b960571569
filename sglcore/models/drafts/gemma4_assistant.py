"""Gemma 4's assistant: a draft that reads the target's own keys and values.

It predicts a token from the target's hidden state of the token before. Its layers have queries only
and store nothing. After its first draft token, its own features replace the target's: through them
alone it sees its earlier draft tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, cast

from sglcore.checkpoint.frozen_draft_config import BACKBONE, FrozenCells
from sglcore.checkpoint.model_config import ModelConfig, RopeConfig
from sglcore.models.architectures.gemma.gemma2 import NORMS
from sglcore.models.drafts.draft_checkpoint import EMBEDDING, DraftCheckpoint, Shapes, same, unfit
from sglcore.models.layer_kinds import Architecture, Array, Attention, Batch, Build, Layer


class FrozenBuild(Build, Protocol):
    """The kinds of layers that only such a draft has."""

    def rotary(self, rope: RopeConfig | None = None, head_dim: int | None = None) -> Any:
        """Return the rotary embedding `rope` (None: the configuration's) for heads of `head_dim`
        elements (None: the configuration's).
        """
        ...

    def frozen_attention(self, cells: FrozenCells, rotary: Any, scaling: float) -> Attention:
        """Return attention over another model's KV slots: [T, heads * head_dim] to the same shape.

        `cells` names the other model's layer. Queries pass `q_norm` of this scope, then `rotary`;
        `scaling` is the factor of scores. Nothing is stored.
        """
        ...

    def chosen_head(self, name: str, groups: int, most: int, head: Layer) -> Layer:
        """Return an output layer: [T, size] to float32 [T, vocab], the logits of `head`.

        Logits are -inf for tokens outside the `most` groups (of `groups`, equal in size) that
        `centroids` of this module select. `token_ordering` lists the tokens group by group.
        """
        ...

    def scale(self, name: str) -> Layer:
        """Return a layer that multiplies its input by the one number `name` of this scope."""
        ...


class AssistantLayer:
    """Attention and feed-forward, each between two norms, and a number that multiplies the sum
    after both.
    """

    __slots__ = ("attention", "mlp", "norms", "o_proj", "q_proj", "scale")

    def __init__(self, build: Build, cells: FrozenCells, rotary: Any) -> None:
        config, own = build.config, cast("FrozenBuild", build)
        inner, attn = config.num_attention_heads * cells.head_dim, build.at("self_attn")
        self.q_proj = attn.linear("q_proj", config.hidden_size, inner, config.attention_bias)
        # The norm of queries replaces the scale of scores.
        self.attention = cast("FrozenBuild", attn).frozen_attention(cells, rotary, 1.0)
        self.o_proj = attn.linear("o_proj", inner, config.hidden_size, config.attention_bias)
        self.mlp = build.mlp("mlp", config.intermediate_size)
        self.norms = tuple(build.norm(name, config.hidden_size, 0.0) for name in NORMS)
        self.scale = own.scale("layer_scalar")

    def __call__(self, hidden: Array, batch: Batch) -> Array:
        """[T, H] to [T, H]."""
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        mixed = self.o_proj(self.attention(self.q_proj(before_attention(hidden)), batch))
        summed = hidden + after_attention(mixed)
        return self.scale(summed + after_mlp(self.mlp(before_mlp(summed))))


class Gemma4AssistantForCausalLM(Architecture):
    """Gemma 4's assistant.

    A forward takes tokens and `features` [T, F] of the tokens before them. It returns [T, H + F]:
    its hidden states, then the features of its draft tokens. `words` of the configuration have:

    - `frozen_cells`: for each layer, the target's layer that it reads.
    - `token_groups`: the number of token groups and the number that a forward selects; or None.

    `aux_layers` is empty: it takes the target's hidden states after the last norm.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        config, inner, own = build.config, build.at("model"), cast("FrozenBuild", build)
        self.feature_size = wide = config.words[BACKBONE]
        kept: tuple[FrozenCells, ...] = config.words["frozen_cells"]
        ropes = {each: self._rotary(own, each) for each in {(each.head_dim, each.window is None) for each in kept}}
        self.target_tokens = build.at("target").embedding("embed_tokens", config.vocab_size, wide)
        self.concat = build.concat()
        self.pre_projection = build.linear("pre_projection", 2 * wide, config.hidden_size)
        self.layers = tuple(
            AssistantLayer(inner.at("layers", place), each, ropes[each.head_dim, each.window is None])
            for place, each in enumerate(kept)
        )
        self.norm = inner.norm("norm", config.hidden_size, 0.0)
        self.post_projection = build.linear("post_projection", config.hidden_size, wide)
        self.embed_tokens = inner.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        tied = self.embed_tokens if config.tie_word_embeddings else None
        head = build.head("lm_head", config.vocab_size, config.hidden_size, tied)
        groups: tuple[int, int] | None = config.words["token_groups"]
        self.lm_head = head if groups is None else own.chosen_head("masked_embedding", *groups, head)
        self.attention_layers = tuple(each.attention.layer for each in self.layers)

    @staticmethod
    def _rotary(build: FrozenBuild, kind: tuple[int, bool]) -> Any:
        """Return the rotary embedding of layers; `kind` is the head size, and whether they have no
        sliding window.
        """
        size, is_full = kind
        config = build.config
        return build.rotary(config.rope if is_full or config.local_rope is None else config.local_rope, size)

    def __call__(self, batch: Batch) -> Array:
        """Return [T, H + F]: hidden states, then features."""
        hidden = self.pre_projection(self.concat(self.target_tokens(batch.input_ids), batch.features))
        for layer in self.layers:
            hidden = layer(hidden, batch)
        hidden = self.norm(hidden)
        return self.concat(hidden, self.post_projection(hidden))

    def logits(self, hidden: Array) -> Array:
        """Return float32 [N, vocab] of a forward's output [N, H + F]."""
        return self.lm_head(hidden[:, : self.config.hidden_size].contiguous())


def is_frozen(names: Collection[str]) -> bool:
    """Return whether tensors of these names are a draft that reads the target's KV slots (Gemma 4's
    assistant).
    """
    return "pre_projection.weight" in names and "post_projection.weight" in names


def shared(shapes: Shapes) -> Mapping[str, str]:
    """Return {the draft's module name: EMBEDDING}, the one part of the target that the draft uses.
    `shapes` is not read; the output layer is the draft's own.
    """
    return {"target.embed_tokens": EMBEDDING}


def frozen_words(config: ModelConfig, shapes: Shapes, target: Architecture) -> dict[str, Any]:
    """Return further entries for the configuration's `words`, which `Gemma4AssistantForCausalLM`
    reads: `frozen_cells` and `token_groups`.

    Each sliding-window layer reads the KV slots of the target's last sliding-window layer, each
    other layer those of the target's last layer without a window. Raises ConfigError for a draft
    that does not fit the target.
    """
    folder, last = config.path, {layer.sliding_window is not None: layer for layer in target.attention_layers}
    same(folder, BACKBONE, config.words.get(BACKBONE, 0), target.config.hidden_size)
    found = list[FrozenCells]()
    for place, window in enumerate(config.sliding_windows):
        layer, kind = last.get(window is not None), "full_attention" if window is None else "sliding_attention"
        if layer is None or layer.rows or layer.is_exact:
            unfit(
                folder, f"layer_types[{place}]", repr(kind), "a kind of layer with keys and values by head in the model"
            )
        size = shapes.get(f"model.layers.{place}.self_attn.q_norm.weight", (0,))[0]
        if size != layer.head_dim or config.num_attention_heads % layer.num_kv_heads:
            heads = f"{config.num_attention_heads} heads of {size} in layer {place}"
            unfit(
                folder,
                "num_attention_heads",
                heads,
                f"a multiple of the model's {layer.num_kv_heads} heads of {layer.head_dim}",
            )
        found.append(FrozenCells(layer.layer_id, layer.num_kv_heads, layer.head_dim, window))
    return {"frozen_cells": tuple(found), "token_groups": _token_groups(config, shapes)}


def _token_groups(config: ModelConfig, shapes: Shapes) -> tuple[int, int] | None:
    """Return the number of token groups and the number that a forward selects.

    None if a forward takes all tokens. Raises ConfigError for numbers that the tensors contradict.
    """
    if not config.words.get("use_ordered_embeddings", False):
        return None
    groups, most = (config.words.get(name, 0) for name in ("num_centroids", "centroid_intermediate_top_k"))
    stored = shapes.get("masked_embedding.centroids.weight", (0,))[0]
    if groups != stored or groups < 1 or config.vocab_size % groups:
        unfit(
            config.path,
            "num_centroids",
            groups,
            f"{stored}, as masked_embedding.centroids has, and a divisor of {config.vocab_size}",
        )
    if not 0 < most <= groups:
        unfit(config.path, "centroid_intermediate_top_k", most, f"1 to {groups}")
    return groups, most


CHECKPOINT = DraftCheckpoint(
    "sglcore.models.drafts.gemma4_assistant:Gemma4AssistantForCausalLM",
    is_frozen,
    frozen_words,
    shared,
    has_own_width=True,
)
