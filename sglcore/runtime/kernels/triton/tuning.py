"""How Triton kernels are launched, as data: a device package makes a `Tuning` from what it knows of its chips."""

from __future__ import annotations

from dataclasses import dataclass, field

import triton


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """One kernel's program: how many threads work on it, and how many loads its loop keeps in flight."""

    threads: int = 128
    stages: int = 2


@dataclass(frozen=True, slots=True)
class MoeTile:
    """Expert products: up to `most_rows` rows for each expert on average use tiles of `rows` x `columns`, of which one
    iteration adds up `depth_bytes` of each row."""

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
    """Launch configurations of every kernel. Results do not depend on them beyond the order of float additions."""

    lanes: int = 32
    """Threads of one warp."""
    elements: int = 2048
    """Elements that one program of an elementwise kernel or norm holds; a longer row is held whole."""
    elementwise: LaunchConfig = LaunchConfig(128, 1)
    norm: LaunchConfig = LaunchConfig(256, 1)
    programs: int = 256
    """Programs that keep the device busy; attention over long requests is split until there are as many."""
    most_splits: int = 64
    decode_tokens: int = 64
    """Tokens of the cache in one iteration of decode attention, while their keys fit into `tile_bytes`."""
    decode: LaunchConfig = LaunchConfig(128, 2)
    merge: LaunchConfig = LaunchConfig(128, 1)
    extend_queries: int = 64
    """Query rows (tokens times heads of a group) of one program of extend attention."""
    extend_tokens: int = 64
    extend: LaunchConfig = LaunchConfig(128, 2)
    tile_bytes: int = 16 << 10
    """Keys of one iteration; several such tiles are in flight in memory that a few programs share."""
    moe: tuple[MoeTile, ...] = field(default=MOE_TILES)
    routing: LaunchConfig = LaunchConfig(128, 1)
    draw_tokens: int = 4096
    """Vocabulary entries of one program of the draw."""
    draw: LaunchConfig = LaunchConfig(256, 1)

    def options(self, config: LaunchConfig) -> dict[str, int]:
        """The launch options of a kernel."""
        return {"num_warps": max(1, config.threads // self.lanes), "num_stages": config.stages}

    def rows(self, width: int, count: int) -> int:
        """How many of `count` rows of `width` elements one program holds: a power of two."""
        wanted = max(1, self.elements // width)
        return min(1 << (wanted.bit_length() - 1), power_of_two(max(count, 1)))

    def fitting(self, tokens: int, token_bytes: int) -> int:
        """At most `tokens`, a power of two, of so many bytes each that fit into one tile; at least 16."""
        return max(16, min(tokens, 1 << ((self.tile_bytes // token_bytes).bit_length() - 1)))


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return triton.next_power_of_2(size)


def tiles(size: int, tile: int) -> int:
    """How many tiles cover `size`."""
    return triton.cdiv(size, tile)
