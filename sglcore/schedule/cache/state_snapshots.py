"""Snapshots: copies of requests' recurrent states at page multiples. Tracks the owner of each
snapshot and the lengths at which a request's steps end to write one.

A state depends on the whole prefix, so a prefix is shared only up to a page with a snapshot. The
worker copies in the order of the steps: a snapshot may be reused as soon as no later planned step
reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sglcore.schedule.cache.prefix_cache import Node


@dataclass(slots=True)
class SavedStates:
    """The snapshots of one request. Only `Snapshots` changes it."""

    restored: int = 0
    """Snapshot from which the request's state starts. 0: zeros."""
    cuts: set[int] = field(default_factory=set)
    """Lengths in tokens at which the request should save a snapshot for others."""
    places: dict[int, int] = field(default_factory=dict)
    """Snapshots of the request: length in tokens to snapshot number."""
    spare: int = 0
    """Length in tokens, a key of `places`, of the snapshot that is replaced as the request grows.
    0: none."""


class Snapshots:
    """Snapshots 1..num_places. Each is free, or belongs to a node (`Node.snapshot`) or to one
    request (`SavedStates.places`).
    """

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.evicted = 0
        self.hits = 0
        self._free = list(range(num_places, 0, -1))
        self._nodes: dict[int, Node] = {}

    @property
    def free(self) -> int:
        """Number of free snapshots."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of snapshots that belong to nodes."""
        return len(self._nodes)

    def ask(self, saved: SavedStates, end: int) -> None:
        """Note that others wait for a request's state after `end` tokens."""
        saved.cuts.add(end)

    def shorten(self, saved: SavedStates, start: int, count: int) -> int:
        """Return the number of tokens, at most `count`, of a request's next chunk, which begins at
        token `start`. The chunk ends at the first of its `cuts` in it. If no snapshot can be
        allocated, these cuts are removed and the chunk keeps its length.
        """
        ends = [end for end in saved.cuts if end <= start + count]
        if not ends:
            return count
        if not self._free and not self._nodes:
            saved.cuts.difference_update(ends)
            return count
        return min(ends) - start

    def save(self, saved: SavedStates, end: int) -> int:
        """Return the snapshot that receives a request's state in the step that ends at `end`
        tokens, a page multiple; 0 for none.

        A snapshot that others wait for (`SavedStates.cuts`) is allocated; one must be free or
        belong to a node. Otherwise the request's spare one is reused; if it has none, one is
        allocated, unless requests hold half of all snapshots (then 0). Allocating may take that of
        the least recently used node.
        """
        if end in saved.cuts:
            saved.cuts.remove(end)
            place = self._take()
        else:
            place = saved.places.pop(saved.spare, 0) or self._take_spare()
            saved.spare = end if place else 0
        if place:
            saved.places[end] = place
        return place

    def keep(self, saved: SavedStates, end: int) -> None:
        """Keep a request's snapshot of `end` tokens, which no cached page can take, as its spare
        one if it covers more tokens than the present spare one. Otherwise free it.
        """
        if end > saved.spare:
            self._give_back(saved, saved.spare)
            saved.spare = end
        else:
            self._give_back(saved, end)

    def publish(self, saved: SavedStates, end: int, node: Node) -> None:
        """Move a request's snapshot of `end` tokens to the node, or free it if the node has one
        already. A collected step must have written it.
        """
        place = saved.places.pop(end)
        if node.snapshot:
            self._free.append(place)
            place = node.snapshot
        node.snapshot = place
        self._touch(node)

    def restore(self, saved: SavedStates, node: Node | None, cuts: set[int]) -> None:
        """Let a request start with the snapshot of `node`, which must have one, or with zeros if
        `node` is None. `cuts`: lengths in tokens at which it should save a snapshot for others.
        """
        saved.restored = 0 if node is None else node.snapshot
        saved.cuts = cuts
        if node is not None:
            self._touch(node)
            self.hits += 1

    def withdraw(self, nodes: Iterable[Node]) -> None:
        """Free the snapshots of evicted nodes."""
        for node in nodes:
            if node.snapshot:
                del self._nodes[node.snapshot]
                self._free.append(node.snapshot)

    def release(self, saved: SavedStates) -> None:
        """Free a request's snapshots."""
        self._free += saved.places.values()
        saved.places.clear()
        saved.spare = 0

    def audit(self, saved: Iterable[SavedStates], nodes: Iterable[Node]) -> None:
        """Raise AssertionError unless each snapshot has exactly one owner: it is free, or belongs
        to one of `nodes`, all those of the cache, or is in one of `saved`, those of all requests
        with pages. O(nodes)."""
        cached = {node.snapshot: node for node in nodes if node.snapshot}
        assert cached == self._nodes, f"nodes have {sorted(cached)}; wanted {sorted(self._nodes)}"
        held = [place for each in saved for place in each.places.values()]
        places = sorted([*self._free, *cached, *held])
        assert places == list(range(1, self.num_places + 1)), f"snapshots lost or held twice: {places}"

    def _take(self) -> int:
        """Return a free snapshot, or take the snapshot of the least recently used node. One of them
        must exist.
        """
        if self._free:
            return self._free.pop()
        place, node = next(iter(self._nodes.items()))
        del self._nodes[place]
        node.snapshot = 0
        self.evicted += 1
        return place

    def _take_spare(self) -> int:
        """Allocate a snapshot for a request's own use, perhaps that of a node, and return it; 0 if
        requests hold half of all snapshots already."""
        held = self.num_places - self.free - self.cached
        return self._take() if 2 * held < self.num_places else 0

    def _give_back(self, saved: SavedStates, end: int) -> None:
        place = saved.places.pop(end, 0)
        if place:
            self._free.append(place)

    def _touch(self, node: Node) -> None:
        self._nodes.pop(node.snapshot, None)
        self._nodes[node.snapshot] = node


def restorable(path: list[Node]) -> int:
    """Return the number of pages up to and with the deepest node of `path` that has a snapshot; 0
    if none has."""
    return next((depth for depth in range(len(path), 0, -1) if path[depth - 1].snapshot), 0)
