"""What a scheduler counts."""

from __future__ import annotations

import msgspec

from sglcore.device.worker import Limits
from sglcore.schedule.memory import Memory


class Levels(msgspec.Struct):
    """What is so at a moment: requests in a state (`waiting` to `in_flight`, which counts steps), pages, snapshots, window pages,
    and the bytes of `Limits`."""

    waiting: int = 0
    running: int = 0
    decoding: int = 0
    in_flight: int = 0
    num_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    unused_cached_pages: int = 0
    num_snapshots: int = 0
    free_snapshots: int = 0
    cached_snapshots: int = 0
    num_window_pages: int = 0
    free_window_pages: int = 0
    cached_window_pages: int = 0
    kv_bytes: int = 0
    window_bytes: int = 0
    state_bytes: int = 0
    snapshot_bytes: int = 0
    host_bytes: int = 0


class SchedulerStats(Levels):
    """The levels, and counters since the start.

    `hit_tokens` of `looked_up_tokens`: prompt tokens that the prefix cache had. `computed_prompt_tokens`: those that the
    device worked on, again after a retraction. `snapshot_hits`: requests that began with a cached copy of a state.
    `stale_rows`: rows that a step computed for a request that had ended meanwhile. `invalid_rows`: rows whose logits were not
    finite.
    """

    evicted_pages: int = 0
    evicted_snapshots: int = 0
    snapshot_hits: int = 0
    evicted_window_pages: int = 0
    hit_tokens: int = 0
    looked_up_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    computed_prompt_tokens: int = 0
    stale_rows: int = 0
    invalid_rows: int = 0


def memory_counts(memory: Memory, limits: Limits) -> dict[str, int]:
    """What is counted of pages, snapshots and window pages, and of the tokens looked up in the prefix cache."""
    snapshots, windows = memory.snapshots, memory.windows
    return {
        "num_pages": memory.pool.num_pages,
        "free_pages": memory.pool.free,
        "cached_pages": memory.cache.num_pages,
        "unused_cached_pages": memory.cache.num_unused,
        "evicted_pages": memory.evicted_pages,
        "num_snapshots": snapshots.num_places,
        "free_snapshots": snapshots.free,
        "cached_snapshots": snapshots.cached,
        "evicted_snapshots": snapshots.evicted,
        "snapshot_hits": snapshots.hits,
        "num_window_pages": windows.num_pages,
        "free_window_pages": windows.free,
        "cached_window_pages": windows.cached,
        "evicted_window_pages": windows.evicted,
        "kv_bytes": limits.kv_bytes,
        "window_bytes": limits.window_bytes,
        "state_bytes": limits.state_bytes,
        "snapshot_bytes": limits.snapshot_bytes,
        "host_bytes": limits.host_bytes,
        "hit_tokens": memory.hit_tokens,
        "looked_up_tokens": memory.looked_up_tokens,
    }
