"""Statistics of a scheduler as plain numbers: current state and counters."""

from __future__ import annotations

import msgspec

from sglcore.schedule.cache.request_pages import Memory
from sglcore.worker.model_worker import Limits


class Levels(msgspec.Struct):
    """The part of `SchedulerStats` without counters: numbers of requests, pages and bytes now.

    Where sliding-window pages share the memory of the KV pages, the KV pages that they consist of
    count as KV pages too: free, cached or in use.
    """

    waiting: int = 0
    """Number of waiting requests."""
    running: int = 0
    """Number of running requests, in prefill or decode."""
    decoding: int = 0
    """Number of requests that decode."""
    in_flight: int = 0
    """Number of steps that are planned and not collected."""
    num_pages: int = 0
    """Number of KV pages."""
    free_pages: int = 0
    """Number of free KV pages."""
    cached_pages: int = 0
    """Number of KV pages in the prefix cache."""
    unused_cached_pages: int = 0
    """Number of KV pages in the prefix cache that no request uses."""
    num_snapshots: int = 0
    """Number of snapshots that fit."""
    free_snapshots: int = 0
    """Number of free snapshots."""
    cached_snapshots: int = 0
    """Number of snapshots in the prefix cache."""
    num_window_pages: int = 0
    """Number of sliding-window pages."""
    free_window_pages: int = 0
    """Number of free sliding-window pages."""
    cached_window_pages: int = 0
    """Number of sliding-window pages in the prefix cache."""
    kv_bytes: int = 0
    """Bytes of the KV pages on each device, as in `Limits`."""
    window_bytes: int = 0
    """Bytes of the sliding-window pages on each device."""
    state_bytes: int = 0
    """Bytes of the states in all request slots on each device."""
    snapshot_bytes: int = 0
    """Bytes of the snapshots on each device."""
    host_bytes: int = 0
    """Bytes of the pages in host memory, for each device."""


class SchedulerStats(Levels):
    """What `Scheduler.stats` returns: the current state, and the scheduler's counters since its
    start.
    """

    evicted_pages: int = 0
    """KV pages that the prefix cache evicted."""
    evicted_snapshots: int = 0
    """Snapshots that the prefix cache evicted."""
    snapshot_hits: int = 0
    """Requests that started from a cached snapshot."""
    evicted_window_pages: int = 0
    """Sliding-window pages that the prefix cache evicted."""
    hit_tokens: int = 0
    """Tokens of admitted requests that the prefix cache had."""
    looked_up_tokens: int = 0
    """Tokens of admitted requests that were looked up in the prefix cache."""
    retractions: int = 0
    """Preemptions."""
    steps: int = 0
    """Steps that were planned."""
    computed_prompt_tokens: int = 0
    """Prompt tokens that the device computed, including those computed again after a preemption."""
    stale_rows: int = 0
    """Rows that a step computed for a request that had ended in the meantime."""
    invalid_rows: int = 0
    """Rows with logits that were not finite."""


def memory_counts(memory: Memory, limits: Limits) -> dict[str, int]:
    """Return the counts of pages, snapshots, window pages and tokens looked up in the prefix cache,
    and the bytes of each kind of memory, by their names in `SchedulerStats`.
    """
    snapshots, windows = memory.snapshots, memory.windows
    return {
        "num_pages": memory.pool.num_pages,
        "free_pages": memory.pool.free if memory.shared is None else memory.shared.free.pages,
        "cached_pages": memory.cache.num_pages + limits.window_unit * windows.cached,
        "unused_cached_pages": memory.cache.num_unused + limits.window_unit * windows.num_unused,
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
