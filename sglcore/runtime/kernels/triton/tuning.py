"""Launch parameters of Triton kernels, as data: a device package makes a `Tuning` for its chips."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import triton

Option = int | float | str | bool
DECIDED = frozenset({"num_warps", "num_stages"})
"""Launch options derived from threads, lanes and stages."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """The launch of one kernel: threads per program, loads in flight per loop (`stages`), and the
    warp size (`lanes`; None: `Tuning.lanes`).

    `options` are passed to the launch unchanged: options of this vendor's compiler (`waves_per_eu`,
    `maxnreg`, `grf_mode`). Raises ValueError for `num_warps` and `num_stages`, which the other
    fields determine. `text` is the whole in JSON, read by `read_launches`.
    """

    threads: int = 128
    stages: int = 2
    lanes: int | None = None
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the options, freeze a copy of them, and write `text`."""
        if taken := sorted(DECIDED & self.options.keys()):
            raise ValueError(f"{', '.join(taken)} of a launch follow from its threads, lanes and stages")
        values = {"threads": self.threads, "stages": self.stages, "lanes": self.lanes, "options": dict(self.options)}
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        object.__setattr__(self, "text", json.dumps(values))


def read_launches(text: str) -> tuple[LaunchConfig, ...]:
    """Return the launches in a JSON list of objects, each as in `LaunchConfig.text`."""
    return tuple(LaunchConfig(**values) for values in json.loads(text))


@dataclass(frozen=True, slots=True)
class MoeTile:
    """The tile of expert products if experts have at most `most_rows` rows on average.

    A tile has `rows` x `columns`; one iteration adds up `depth_bytes` of each row.
    """

    most_rows: int
    rows: int
    columns: int
    depth_bytes: int
    config: LaunchConfig


MOE_TILES = (
    MoeTile(8, 16, 64, 128, LaunchConfig(128, 3)),
    MoeTile(64, 64, 64, 128, LaunchConfig(128, 3)),
    MoeTile(1 << 31, 128, 64, 64, LaunchConfig(256, 3)),
)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How every Triton kernel is launched. A device package makes it.

    Results do not depend on it beyond the order of float additions. A field named as a kernel entry
    is that entry's launch.
    """

    lanes: int = 32
    """Threads per warp (the warp size)."""
    float8: str | None = None
    """The 8-bit float format that the device converts by an instruction. All other formats are
    converted by their bits. None: the device has no such instruction."""
    elements: int = 2048
    """Elements that one program of an elementwise kernel or norm holds. A norm holds a longer row
    whole.
    """
    rms_norm: LaunchConfig = LaunchConfig(256, 1)
    """RMS norm."""
    add_rms_norm: LaunchConfig = LaunchConfig(256, 1)
    """Residual add and RMS norm."""
    silu_and_mul: LaunchConfig = LaunchConfig(128, 1)
    """The gated activations."""
    rotary: LaunchConfig = LaunchConfig(128, 1)
    """Rotary embedding."""
    rotary_and_store: LaunchConfig = LaunchConfig(128, 1)
    """Rotary embedding, and storing keys and values."""
    store_kv: LaunchConfig = LaunchConfig(128, 1)
    """Storing keys and values in the KV pool."""
    cache_locations: LaunchConfig = LaunchConfig(128, 1)
    """Finding the KV slots of tokens in the page table."""
    place_proposals: LaunchConfig = LaunchConfig(32, 1)
    """Placing draft tokens in the rows of a decode step."""
    accept_proposals: LaunchConfig = LaunchConfig(32, 1)
    """Accepting draft tokens of chains."""
    tree_walk: LaunchConfig = LaunchConfig(32, 1)
    """Accepting draft tokens of trees."""
    tree_expand: LaunchConfig = LaunchConfig(128, 1)
    """Choosing the next beams of a draft tree."""
    tree_build: LaunchConfig = LaunchConfig(128, 1)
    """Choosing the nodes of a draft tree."""
    tree_place: LaunchConfig = LaunchConfig(32, 1)
    """Writing draft trees into the tables of their slots."""
    programs: int = 256
    """Programs that keep the device busy. Attention over long requests is split until it has this
    number of programs."""
    most_splits: int = 64
    """Maximum number of parts into which attention over one request is split."""
    decode_tokens: int = 64
    """Tokens of the cache in one iteration of decode attention, while their keys fit into
    `tile_bytes`."""
    decode_programs: int = 512
    """Programs of decode attention. They take the chunks of all requests in turn."""
    most_parts: int = 4096
    """Maximum number of chunks of all requests of decode attention, a limit of its memory: each has
    a float32 result of all heads."""
    decode: LaunchConfig = LaunchConfig(128, 2)
    """Decode attention."""
    merge: LaunchConfig = LaunchConfig(128, 1)
    """Merging the parts of split attention."""
    extend_queries: int = 64
    """Query rows (tokens times heads of a group) of one program of prefill attention."""
    extend_tokens: int = 64
    """Tokens of the cache in one iteration of prefill attention, while their keys fit into
    `tile_bytes`."""
    extend: LaunchConfig = LaunchConfig(128, 2)
    """Prefill attention."""
    tile_bytes: int = 16 << 10
    """Bytes of the keys in one iteration of decode and prefill attention. Several such tiles are in
    flight in memory that a few programs share.
    """
    sparse_heads: int = 64
    """Heads of one program of attention over rows that all heads share, in 16-bit types. The memory
    of a program grows with them."""
    sparse_tokens: int = 16
    """Rows in one iteration of attention over rows that all heads share, in 16-bit types."""
    sparse_mqa: LaunchConfig = LaunchConfig(256, 2)
    """Attention over chosen rows that all heads share."""
    index_tokens: int = 64
    """Rows per iteration of the indexer's scores."""
    index_logits: LaunchConfig = LaunchConfig(128, 2)
    """The indexer's scores."""
    index_scanned: int = 4096
    """Scores in one iteration of the search for the highest scores of the indexer."""
    index_top_k: LaunchConfig = LaunchConfig(512, 1)
    """The search for the highest scores of the indexer."""
    compress_tokens: int = 128
    """Most tokens of a block that one iteration adds up to its compressed row, a power of two."""
    compress_elements: int = 2048
    """Elements, tokens times channels, of such an iteration."""
    compress: LaunchConfig = LaunchConfig(128, 1)
    """Making compressed rows, and storing the state that they are made from."""
    top_k_routing: LaunchConfig = LaunchConfig(128, 1)
    """Choosing experts."""
    moe: tuple[MoeTile, ...] = field(default=MOE_TILES)
    """Tiles of expert products, ascending by `most_rows`."""
    moe_sort: LaunchConfig = LaunchConfig(128, 1)
    """Sorting token rows by expert."""
    moe_sum: LaunchConfig = LaunchConfig(128, 1)
    """Adding up the experts' results of each token."""
    conv_tokens: int = 16
    """Tokens of a row per program of a prefill convolution."""
    conv_channels: int = 256
    """Channels in one program of a convolution."""
    causal_conv: LaunchConfig = LaunchConfig(128, 1)
    """The causal convolution."""
    state_columns: int = 32
    """Values of a head in the part of the recurrent state that one program holds."""
    gated_delta_rule: LaunchConfig = LaunchConfig(128, 1)
    """The gated delta rule."""
    scan_tokens: int = 32
    """Tokens per chunk of a selective scan in prefill."""
    selective_scan: LaunchConfig = LaunchConfig(128, 1)
    """The selective scan."""
    gated_rms_norm: LaunchConfig = LaunchConfig(128, 1)
    """The gated RMS norm."""
    rope_tail: LaunchConfig = LaunchConfig(128, 1)
    """Rotating the last elements of rows; storing latent rows and index keys too."""
    window_rows: LaunchConfig = LaunchConfig(128, 1)
    """Finding the rows of a sliding window, and those of blocks (`block_rows`)."""
    compress_plan: LaunchConfig = LaunchConfig(128, 1)
    """Planning which tokens complete a compressed row."""
    swap_in: LaunchConfig = LaunchConfig(512, 1)
    """Finding the chosen rows that are not on the device."""
    copy_programs: int = 1024
    """Programs that share the copies of all requests. Each copies `elements` words at a time."""
    copy_rows: LaunchConfig = LaunchConfig(128, 1)
    """Copying rows between host memory and the device."""
    hc_split: int = 1024
    """Elements of a token's streams that one program adds up for the mixing weights
    (hyper-connections)."""
    hc_depth: int = 64
    """Elements in one iteration of the sum for the mixing weights (hyper-connections)."""
    hc_pre: LaunchConfig = LaunchConfig(128, 2)
    """Mixing streams into one before a block (`hc_head` too)."""
    hc_post: LaunchConfig = LaunchConfig(128, 1)
    """Mixing one stream into all after a block."""
    draw_tokens: int = 4096
    """Vocabulary entries per program of the draw."""
    draw: LaunchConfig = LaunchConfig(256, 1)
    """Drawing tokens."""

    def options(self, config: LaunchConfig) -> dict[str, Option]:
        """Return the launch options of Triton for this config: `num_warps`, `num_stages` and its
        own options.
        """
        lanes = config.lanes or self.lanes
        return {"num_warps": max(1, config.threads // lanes), "num_stages": config.stages, **config.options}

    def rows(self, width: int, count: int) -> int:
        """Return how many of `count` rows of `width` elements one program holds: a power of two.

        1 for at most one row, and the same for every larger count, so that a kernel is compiled for
        two numbers of rows: a new number would make all requests wait for the compiler.
        """
        wanted = max(1, self.elements // width)
        return 1 if count <= 1 else 1 << (wanted.bit_length() - 1)

    def fitting(self, tokens: int, token_bytes: int) -> int:
        """Return how many tokens of `token_bytes` bytes fit in `tile_bytes`: a power of two, at
        least 16 and at most `tokens`, which is a power of two.
        """
        return max(16, min(tokens, 1 << ((self.tile_bytes // token_bytes).bit_length() - 1)))


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return triton.next_power_of_2(size)


def tiles(size: int, tile: int) -> int:
    """Return how many tiles of `tile` elements cover `size` elements."""
    return triton.cdiv(size, tile)
