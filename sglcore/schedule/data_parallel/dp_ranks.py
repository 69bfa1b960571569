"""Requests in several shards (DP ranks), each with its own scheduler, pages and prefix cache:
routing of new requests, and common counts.

All shards are in one process, so an agreement among them is a plain loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import structs

from sglcore.schedule.request import Request, State
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.scheduler_stats import SchedulerStats
from sglcore.worker.model_worker import Limits

ROOM = 4
"""A shard may have 1/ROOM of a worker's requests (at least one request) more than the least busy
shard and still be chosen.
"""
SLACK = 64
AT_ONCE = frozenset({"steps", "in_flight", "kv_bytes", "window_bytes", "state_bytes", "snapshot_bytes", "host_bytes"})
"""Statistics that are common to all shards or belong to each device: they are not summed, the
maximum is reported.
"""


def choose_shard(hits: Sequence[int], loads: Sequence[int], room: int) -> int:
    """Return the shard for a request with `hits` cached pages in each shard. Among the shards with
    at most `room` requests more than the least busy of `loads`: most cached pages first, then least
    busy, then lowest index.
    """
    least = min(loads)
    fit = [shard for shard, load in enumerate(loads) if load - least <= room]
    return max(fit, key=lambda shard: (hits[shard], -loads[shard], -shard))


class Shards:
    """Several schedulers with the interface of one. Not thread-safe."""

    def __init__(self, limits: Limits, count: int, *, make: Callable[[Limits], Scheduler] = Scheduler) -> None:
        """`limits` apply to each of the `count` shards; `make` makes a shard's scheduler."""
        self.limits = limits
        self.each = tuple(make(limits) for _ in range(count))
        self._room = max(1, limits.max_requests // ROOM)
        self._placed: dict[str, tuple[Request, int]] = {}
        self._pruned_at = SLACK

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or a step is in flight."""
        return any(scheduler.has_work for scheduler in self.each)

    @property
    def awaits_tokens(self) -> bool:
        """Whether a row of a step in flight samples under a grammar."""
        return any(scheduler.awaits_tokens for scheduler in self.each)

    @property
    def drafts(self) -> Counter[tuple[int, int, int, int]]:
        """Number of request steps of all shards, by (context, cached, proposed, accepted) of
        `DraftCell`."""
        return sum((scheduler.drafts for scheduler in self.each), Counter[tuple[int, int, int, int]]())

    def add(self, request: Request) -> None:
        """Queue a request in the shard with most of its prompt cached, unless that shard is far
        busier. A request with a `leader` goes to its leader's shard. Raises RequestError if it can
        never run, if a request with its `rid` has not ended, or if its `leader` was not added.
        """
        known = self._placed.get(request.rid)
        if known is not None and known[0].state is not State.FINISHED:
            raise RequestError(f"request {request.rid!r} was added before; give every request its own id")
        shard = self._shard_for(request)
        self.each[shard].add(request)
        self._placed[request.rid] = request, shard
        self._prune()

    def abort(self, rid: str) -> EngineOutput | None:
        """End a request now, in any state. Returns its last output, or None if it is unknown or has
        ended."""
        scheduler = self._of(rid)
        return None if scheduler is None else scheduler.abort(rid)

    def stop(self, rid: str, cause: str) -> EngineOutput | None:
        """End a request after its text reached the stop string `cause`. Returns its last output, or
        None if it is unknown or has ended."""
        scheduler = self._of(rid)
        return None if scheduler is None else scheduler.stop(rid, cause)

    def flush_prefix_cache(self) -> int:
        """Evict the cached prefixes that no running request uses. Returns the number of pages."""
        return sum(scheduler.flush_prefix_cache() for scheduler in self.each)

    def stats(self) -> SchedulerStats:
        """Return the sums over all shards, and for the names in `AT_ONCE` the largest value of a
        shard.
        """
        found = [structs.asdict(scheduler.stats()) for scheduler in self.each]
        return SchedulerStats(
            **{name: (max if name in AT_ONCE else sum)(one[name] for one in found) for name in found[0]}
        )

    def audit(self) -> None:
        """Raise AssertionError if a page, request slot, snapshot or window page of a shard is lost
        or held twice."""
        for scheduler in self.each:
            scheduler.audit()

    def _of(self, rid: str) -> Scheduler | None:
        placed = self._placed.get(rid)
        return None if placed is None else self.each[placed[1]]

    def _shard_for(self, request: Request) -> int:
        if request.leader is not None and request.leader.rid in self._placed:
            return self._placed[request.leader.rid][1]
        counts = [scheduler.stats() for scheduler in self.each]
        hits = [scheduler.memory.cached_pages(request) for scheduler in self.each]
        return choose_shard(hits, [count.waiting + count.running for count in counts], self._room)

    def _prune(self) -> None:
        """Forget ended requests when they may be half of all."""
        if len(self._placed) > self._pruned_at:
            self._placed = {rid: one for rid, one in self._placed.items() if one[0].state is not State.FINISHED}
            self._pruned_at = 2 * len(self._placed) + SLACK
