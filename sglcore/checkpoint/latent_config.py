"""Configuration of latent attention: low ranks of queries and keys, and the indexer that chooses
the tokens that a query sees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.model_config import ModelConfig
from sglcore.core.errors import ConfigError

FULL, SHARED = "full", "shared"
INNER_EPS = 1e-6
"""Epsilon of the norms of the low ranks, whatever the configuration's epsilon is."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, section 2.1), and its indexer (DeepSeek-V3.2).
    `latent_config` makes it.
    """

    q_rank: int
    """Rank of the query projection. 0: plain queries."""
    kv_rank: int
    """Latent elements of a token, from which each head computes its key and its value."""
    nope_dim: int
    """Elements of a key or query head that are not rotated."""
    rope_dim: int
    """Rotated elements of a token, shared by all heads."""
    value_dim: int
    """Elements of a value head."""
    scaling: float
    """Factor of attention scores."""
    top_k: int = 0
    """Tokens that the indexer chooses for a query. 0: a query sees all."""
    index_heads: int = 0
    """Heads of the indexer."""
    index_dim: int = 0
    """Elements of an indexer head."""
    indexers: tuple[str, ...] = ()
    """For each layer FULL, or SHARED if it uses the choice of the layer before. Empty: no
    indexer."""
    is_paired: bool = False
    """The indexer rotates pairs of neighbours. False: pairs that are half of the rotated elements
    apart."""

    @property
    def query_dim(self) -> int:
        """Elements of a query head."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Elements of a token's cache entry in a layer, without the indexer's entry."""
        return self.kv_rank + self.rope_dim


def latent_config(config: ModelConfig, wanted: Mapping[str, Any]) -> LatentConfig:
    """Return the latent attention of a model's configuration, without an indexer. `wanted`:
    required values of keys, if the configuration has these keys. Raises `ConfigError` for other
    values, for a partly rotated `qk_rope_head_dim`, and for a sliding window."""
    words = config.words
    for name, value in {**wanted, "rope_interleave": True, "moe_layer_freq": 1}.items():
        if words.get(name, value) != value:
            raise _unfit(config, name, words[name], repr(value))
    if config.rope.partial != 1:
        raise _unfit(config, "partial_rotary_factor", config.rope.partial, "1: all of qk_rope_head_dim is rotated")
    if any(config.sliding_windows):
        raise _unfit(config, "sliding_window", words["sliding_window"], "none with latent attention")
    return LatentConfig(
        q_rank=words.get("q_lora_rank", 0),
        kv_rank=words["kv_lora_rank"],
        nope_dim=words["qk_nope_head_dim"],
        rope_dim=words["qk_rope_head_dim"],
        value_dim=words["v_head_dim"],
        scaling=_scaling(config),
    )


def _scaling(config: ModelConfig) -> float:
    """Return the factor of scores: 1 / sqrt(elements of a query head), times the square of YaRN's
    factor for `mscale_all_dim` (Peng et al. 2023, section 3.4) if the context is extended."""
    words, rope = config.words, config.rope
    scaling = (words["qk_nope_head_dim"] + words["qk_rope_head_dim"]) ** -0.5
    weight, factor = rope.scaling.get("mscale_all_dim"), rope.scaling.get("factor") or 1.0
    if rope.kind == "default" or not weight or factor <= 1:
        return scaling
    return scaling * (0.1 * weight * math.log(factor) + 1.0) ** 2


def with_indexer(config: ModelConfig, latent: LatentConfig, is_paired: bool) -> LatentConfig:
    """Return a copy of `latent` with the configuration's indexer; `is_paired`: it rotates pairs of
    neighbours. Raises `ConfigError` if the indexer does not fit."""
    words, layers = config.words, config.num_hidden_layers
    if words["index_head_dim"] < latent.rope_dim:
        raise _unfit(
            config, "index_head_dim", words["index_head_dim"], f"qk_rope_head_dim, {latent.rope_dim}, at least"
        )
    if not latent.q_rank:
        raise _unfit(config, "q_lora_rank", None, "a rank, from which the indexer computes its queries")
    kinds = words.get("indexer_types") or _pattern(words, layers)
    if len(kinds) != layers or kinds[0] != FULL or not {*kinds} <= {FULL, SHARED}:
        raise _unfit(config, "indexer_types", list(kinds), f"{layers}, each {FULL!r} or {SHARED!r}, the first {FULL!r}")
    return replace(
        latent,
        top_k=words["index_topk"],
        index_heads=words["index_n_heads"],
        index_dim=words["index_head_dim"],
        indexers=tuple(kinds),
        is_paired=is_paired,
    )


_LETTERS: Mapping[str, str] = MappingProxyType({"F": FULL, "S": SHARED})


def _pattern(words: Mapping[str, Any], layers: int) -> list[str]:
    """Return FULL or SHARED for each layer, from a pattern of the letters F and S (its length is
    not checked here), or from a period: the layers before `index_skip_topk_offset` are FULL, and
    then each `index_topk_freq`-th after the last of them."""
    if pattern := words.get("index_topk_pattern"):
        return [_LETTERS.get(each, each) for each in pattern]
    every, first = max(words.get("index_topk_freq", 1), 1), words.get("index_skip_topk_offset", 2)
    return [SHARED if max(layer - first + 1, 0) % every else FULL for layer in range(layers)]


def _unfit(config: ModelConfig, name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"{config.file} has {name} = {value!r:.80}",
        wanted=wanted,
        remedy="try --model-impl transformers, or use another checkpoint",
    )
