"""Configuration of attention over compressed blocks, and of hyper-connections (DeepSeek-V4).

Two dialects: transformers' saved form (`layer_types`, `mlp_layer_types`, `compress_rates`) and the
published one (`compress_ratios`, `num_hash_layers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sglcore.checkpoint.model_config import ModelConfig, RopeConfig, rope_config
from sglcore.core.errors import ConfigError

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS: Mapping[int, str] = MappingProxyType({0: SLIDING, 4: SPARSE, 128: HEAVY})
"""Numbers in `compress_ratios` -> kinds of layers."""
RATES: Mapping[str, int] = MappingProxyType({SPARSE: 4, HEAVY: 128})
"""Default tokens of a block by kind of layer, and the kinds that `compress_rates` may name."""
HASHED, LEARNED = "hash_moe", "moe"
REMEDY = "check that config.json belongs to this checkpoint"


@dataclass(frozen=True, slots=True)
class Compression:
    """How a layer compresses `ratio` tokens to one cache row. `is_sparse`: the row also depends on
    the block before, with twice the channels per token, and an indexer chooses among the blocks."""

    ratio: int
    is_sparse: bool

    @property
    def span(self) -> int:
        """Number of tokens on which a row depends: `ratio`, or twice that if `is_sparse`."""
        return self.ratio * self.series

    @property
    def series(self) -> int:
        """Channels of a token, in multiples of a row's channels: 2 if `is_sparse`, else 1."""
        return 2 if self.is_sparse else 1


@dataclass(frozen=True, slots=True)
class CompressedConfig:
    """Attention over a sliding window and over compressed blocks, and hyper-connections
    (DeepSeek-V4). `compressed_config` makes it.

    Keys and values are the same rows.
    """

    heads: int
    """Query heads."""
    head_dim: int
    """Elements of a query head, and of a row, which is both key and value."""
    rope_dim: int
    """Number of rotated elements at the end of a head and of a row."""
    q_lora_rank: int
    """Rank of the query projection."""
    groups: int
    """Number of groups of heads; the results of a group are projected together."""
    o_lora_rank: int
    """Rank of each group's output projection."""
    window: int
    """Number of last tokens that each query sees uncompressed."""
    index_heads: int
    """Heads of the indexer."""
    index_dim: int
    """Elements of an indexer head."""
    index_topk: int
    """Blocks that the indexer chooses."""
    compressions: tuple[Compression | None, ...]
    """The compression of each layer. None: a layer with a sliding window only."""
    main_rope: RopeConfig
    """The rotary embedding of layers without compression."""
    block_rope: RopeConfig
    """The rotary embedding of layers with compression."""
    is_hashed: tuple[bool, ...]
    """For each layer, whether the token's id chooses its experts (hash routing)."""
    streams: int
    """Streams of a token (hyper-connections)."""
    sinkhorn_iters: int
    """Iterations of the mixing of streams."""
    hc_eps: float
    """The epsilon of that mixing."""
    limit: float
    """Bound of the intermediate values of experts."""

    @property
    def of_next_token(self) -> CompressedConfig:
        """The configuration of an MTP layer: sliding window only, and learned routing."""
        return replace(self, compressions=(None,), is_hashed=(False,))


def compressed_config(config: ModelConfig) -> CompressedConfig:
    """Return the compressed attention of a model's configuration; defaults are those of
    DeepSeek-V4-Flash. Raises `ConfigError` for values that both dialects lack, and for values that
    do not fit."""
    words = config.words
    found = CompressedConfig(
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        rope_dim=int(config.head_dim * config.rope.partial),
        q_lora_rank=words["q_lora_rank"],
        groups=words["o_groups"],
        o_lora_rank=words["o_lora_rank"],
        window=words["sliding_window"],
        index_heads=words["index_n_heads"],
        index_dim=words["index_head_dim"],
        index_topk=words["index_topk"],
        compressions=_compressions(config),
        main_rope=config.rope,
        block_rope=_block_rope(config),
        is_hashed=_hashed(config),
        streams=words["hc_mult"],
        sinkhorn_iters=words["hc_sinkhorn_iters"],
        hc_eps=words["hc_eps"],
        limit=words["swiglu_limit"],
    )
    _check(config, found)
    return found


def _compressions(config: ModelConfig) -> tuple[Compression | None, ...]:
    """Return each layer's compression; None for a layer with a sliding window only. Raises
    `ConfigError` for a wrong rate."""
    rates = dict(RATES) | config.words.get("compress_rates", {})
    rates |= {
        kind: config.words[f"compress_rate_{word}"]
        for kind, word in ((SPARSE, "csa"), (HEAVY, "hca"))
        if f"compress_rate_{word}" in config.words
    }
    wrong = {kind: rate for kind, rate in rates.items() if kind not in RATES or type(rate) is not int or rate < 1}
    if wrong:
        kind, rate = next(iter(wrong.items()))
        raise _wrong(
            config, f"compress_rates of {kind} = {rate!r}", f"a whole number above zero for {' and '.join(RATES)}"
        )
    return tuple(None if kind == SLIDING else Compression(rates[kind], kind == SPARSE) for kind in _kinds(config))


def _kinds(config: ModelConfig) -> Sequence[str]:
    given, ratios = config.raw.get("layer_types"), config.raw.get("compress_ratios")
    if given is not None:
        return _each(config, "layer_types", given, (SLIDING, SPARSE, HEAVY))
    if ratios is None:
        raise _wrong(config, "neither layer_types nor compress_ratios", "one of them, with an entry for each layer", "")
    return [KINDS[ratio] for ratio in _each(config, "compress_ratios", ratios, tuple(KINDS))]


def _hashed(config: ModelConfig) -> tuple[bool, ...]:
    kinds, layers = config.raw.get("mlp_layer_types"), config.num_hidden_layers
    if kinds is not None:
        return tuple(kind == HASHED for kind in _each(config, "mlp_layer_types", kinds, (HASHED, LEARNED)))
    count = config.words.get("num_hash_layers")
    if count is None:
        raise _wrong(
            config, "neither num_hash_layers nor mlp_layer_types", "how many layers choose experts by a token's id", ""
        )
    return tuple(layer < count for layer in range(layers))


def _each(config: ModelConfig, name: str, given: Sequence[Any], known: Sequence[Any]) -> Sequence[Any]:
    """Return the first entries of `given`, one for each of the model's own layers; entries for MTP
    layers may follow them. Raises `ConfigError` for an entry that is not in `known`, or if there
    are too few."""
    layers = config.num_hidden_layers
    unknown = next(((layer, kind) for layer, kind in enumerate(given[:layers]) if kind not in known), None)
    if unknown is not None:
        raise _wrong(config, f"{name} = {unknown[1]!r} for layer {unknown[0]}", f"one of {', '.join(map(str, known))}")
    if len(given) < layers:
        raise _wrong(config, f"{len(given)} {name}", f"{layers}, one for each layer")
    return given[:layers]


def _block_rope(config: ModelConfig) -> RopeConfig:
    """Return the rotary embedding of compressed layers, without YaRN's factor for cosines and
    sines."""
    rope = rope_config(config.words["block_rope"], config.words, config.max_position_embeddings)
    return replace(rope, scaling=MappingProxyType({**rope.scaling, "attention_factor": 1.0}))


def _check(config: ModelConfig, net: CompressedConfig) -> None:
    words = config.words
    rules = (
        ("num_key_value_heads", config.num_key_value_heads, config.num_key_value_heads == 1, "1"),
        (
            "o_groups",
            net.groups,
            net.heads * net.head_dim % net.groups == 0,
            f"a divisor of {net.heads} heads of {net.head_dim}",
        ),
        ("qk_rope_head_dim", net.rope_dim, 0 < net.rope_dim <= net.head_dim, f"1 to head_dim, {net.head_dim}"),
        ("index_head_dim", net.index_dim, net.index_dim >= net.rope_dim, f"at least the rotated {net.rope_dim}"),
        ("scoring_func", words["scoring_func"], words["scoring_func"] == "sqrtsoftplus", "'sqrtsoftplus'"),
        ("n_shared_experts", words["n_shared_experts"], words["n_shared_experts"] == 1, "1"),
        ("attention_bias", config.attention_bias, not config.attention_bias, "False"),
        ("mlp_bias", config.mlp_bias, not config.mlp_bias, "False"),
    )
    for name, value, fits, wanted in rules:
        if not fits:
            raise _wrong(config, f"{name} = {value!r}", wanted)


def _wrong(config: ModelConfig, found: str, wanted: str, remedy: str = REMEDY) -> ConfigError:
    return ConfigError(
        f"{config.file} has {found}",
        wanted=wanted,
        remedy=remedy or "add it, as the model's card has it",
    )
