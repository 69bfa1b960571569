"""Copies of requests' states at page multiples: who has which place, and where a request's steps end to leave one.

A state belongs to the whole prefix before it: tokens are shared up to a page whose node has a snapshot, no further. The
worker copies in the order of the steps, so a place may be planned anew once no step planned later reads what it has.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglcore.schedule.prefix_cache import Node
from sglcore.schedule.request import Request


class Snapshots:
    """Places 1..num_places, each free, a node's (`Node.snapshot`), or one request's (`Request.snapshots`)."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.evicted = 0
        self.hits = 0
        self._free = list(range(num_places, 0, -1))
        self._nodes: dict[int, Node] = {}

    @property
    def free(self) -> int:
        """Places that nobody has."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Places that nodes have."""
        return len(self._nodes)

    def shorten(self, request: Request, count: int) -> int:
        """At most `count` tokens of the request's next chunk: up to where a snapshot is wanted, if a place can be had."""
        ends = [end for end in request.cuts if end <= request.num_cells + count]
        if not ends:
            return count
        if not self._free and not self._nodes:
            request.cuts.difference_update(ends)
            return count
        return min(ends) - request.num_cells

    def save(self, request: Request, end: int) -> int:
        """The place into which the step that ends at `end` cells, a page multiple, copies the request's state; 0 for none.

        Where a snapshot is wanted for others it has a place of its own, elsewhere it replaces the spare. Embeddings get none:
        nothing is matched with them, not even what they computed themselves.
        """
        if request.embeds is not None:
            return 0
        if end in request.cuts:
            request.cuts.remove(end)
            place = self._take()
        else:
            place = request.snapshots.pop(request.spare, 0) or self._take_spare()
            request.spare = end if place else 0
        if place:
            request.snapshots[end] = place
        return place

    def keep(self, request: Request, end: int) -> None:
        """A snapshot that no node can have yet becomes the request's spare, if it is of more tokens."""
        if end > request.spare:
            self._give_back(request, request.spare)
            request.spare = end
        else:
            self._give_back(request, end)

    def publish(self, request: Request, end: int, node: Node) -> None:
        """The request's snapshot of `end` cells, which a collected step has written, is the node's now."""
        place = request.snapshots.pop(end)
        if node.snapshot:
            self._free.append(place)
            place = node.snapshot
        node.snapshot = place
        self._touch(node)

    def restore(self, request: Request, node: Node | None) -> None:
        """The request begins with the node's snapshot, or with zeros."""
        request.restored = 0 if node is None else node.snapshot
        if node is not None:
            self._touch(node)
            self.hits += 1

    def withdraw(self, nodes: Iterable[Node]) -> None:
        """Nodes left the cache: their places are free."""
        for node in nodes:
            if node.snapshot:
                del self._nodes[node.snapshot]
                self._free.append(node.snapshot)

    def release(self, request: Request) -> None:
        """Take back what the request still has."""
        self._free += request.snapshots.values()
        request.snapshots.clear()
        request.spare = 0

    def audit(self, holders: Iterable[Request], nodes: Iterable[Node]) -> None:
        """Raise AssertionError unless every place is in exactly one place; O(nodes)."""
        cached = {node.snapshot: node for node in nodes if node.snapshot}
        assert cached == self._nodes, f"nodes have {sorted(cached)}; wanted {sorted(self._nodes)}"
        held = [place for request in holders for place in request.snapshots.values()]
        places = sorted([*self._free, *cached, *held])
        assert places == list(range(1, self.num_places + 1)), f"snapshots lost or held twice: {places}"

    def _take(self) -> int:
        """A free place, or that of the node least recently used; there is one of either."""
        if self._free:
            return self._free.pop()
        place, node = next(iter(self._nodes.items()))
        del self._nodes[place]
        node.snapshot = 0
        self.evicted += 1
        return place

    def _take_spare(self) -> int:
        """Half of all places stay for what others can share."""
        held = self.num_places - self.free - self.cached
        return self._take() if 2 * held < self.num_places else 0

    def _give_back(self, request: Request, end: int) -> None:
        place = request.snapshots.pop(end, 0)
        if place:
            self._free.append(place)

    def _touch(self, node: Node) -> None:
        self._nodes.pop(node.snapshot, None)
        self._nodes[node.snapshot] = node


def restorable(path: list[Node]) -> int:
    """Pages up to the deepest node of `path` that has a snapshot."""
    return next((depth for depth in range(len(path), 0, -1) if path[depth - 1].snapshot), 0)
