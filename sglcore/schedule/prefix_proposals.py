"""Proposals from the prefix cache: what followed a request's whole text before, in the published pages of others.

Lookups change nothing of the cache: they lock no page and touch no order of eviction. A page that is evicted between a lookup and
the step costs nothing, as what was read of it are tokens, which the step verifies.

Cost: while a text follows the same page one comparison of bytes a request and step; a dictionary lookup for each page that it
fills. Where it left all known pages, one comparison of numbers until something is published; then `MOST_LOOKED_AT` pages at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from sglcore.schedule.memory import Memory
from sglcore.schedule.prefix_cache import Node
from sglcore.schedule.request import Ints, Request

NONE = -1
"""In place of a proposal: there is none here, nor after it."""
MOST_LOOKED_AT = 64
"""Pages after the same text, the newest first, so that a step does not grow with the cache."""
ID_BYTES = np.dtype(np.int32).itemsize


class Standing:
    """Where a text stands in the cache: below `node`, the page of its first `pages` full ones. `ahead` is the page that it follows
    (None: none is known), as of the cache's `version`."""

    __slots__ = ("ahead", "node", "pages", "version")

    def __init__(self, node: Node, pages: int) -> None:
        self.node = node
        self.pages = pages
        self.ahead: Node | None = None
        self.version = -1


class PrefixProposals:
    """Up to `count` proposals of each request, from the pages of `memory`."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._cache = memory.cache
        self._count = count

    def propose(self, requests: Sequence[Request]) -> Ints | None:
        """int32[B, count], what followed the texts of B running requests before, all of whose tokens are known; NONE from where
        nothing is known. None: nothing is, of any."""
        if not self._cache.num_pages:
            return None
        found = [(row, tokens) for row, request in enumerate(requests) if (tokens := self.following(request))]
        if not found:
            return None
        proposals = np.full((len(requests), self._count), NONE, dtype=np.int32)
        for row, tokens in found:
            proposals[row, : len(tokens)] = tokens
        return proposals

    def following(self, request: Request) -> list[int]:
        """Up to `count` tokens that followed the request's text."""
        if request.embeds is not None or request.node is None:
            return []
        standing, version = self._standing(request), self._memory.version
        if standing.ahead is None and standing.version == version:
            return []
        standing.version = version
        rest = self._descend(request, standing)
        ahead = standing.ahead
        if ahead is None or ahead.parent is not standing.node or not ahead.key.startswith(rest):
            ahead = standing.ahead = latest(standing.node, rest)
        return [] if ahead is None else self._read(ahead, len(rest))

    def _standing(self, request: Request) -> Standing:
        """The one that is known, unless its page was evicted since; else from the pages that the request holds."""
        known = request.standing
        if known is None or (known.node.parent is None and known.node is not self._cache.root):
            assert request.node is not None
            known = request.standing = Standing(request.node, request.shared)
        return known

    def _descend(self, request: Request, standing: Standing) -> bytes:
        """Follow the text through its full pages; the bytes of what is behind the last one that is there."""
        cache, size, total = self._cache, self._cache.page_size, request.num_tokens
        rest = request.tokens(standing.pages * size, total)
        while len(rest) >= size + cache.lookahead:
            child = standing.node.children.get(cache.key(rest, 0))
            if child is None:
                break
            standing.node, standing.pages, standing.ahead = child, standing.pages + 1, None
            rest = rest[size:]
        return rest.tobytes()

    def _read(self, node: Node, begin: int) -> list[int]:
        """The tokens of `node` from byte `begin` of its key, and of what was last used behind it."""
        text, wanted, overlap = node.key[begin:], self._count * ID_BYTES, self._cache.lookahead * ID_BYTES
        while len(text) < wanted and (
            following := latest(node, node.key[len(node.key) - overlap :] if overlap else b"")
        ):
            node = following
            text += node.key[overlap:]
        return np.frombuffer(text[:wanted], dtype=np.int32).tolist()


def latest(node: Node, text: bytes) -> Node | None:
    """The page below `node` that begins with `text` and was used last; of those in use the one published last."""
    found, best = None, -1
    for child in islice(reversed(node.children.values()), MOST_LOOKED_AT):
        if child.key.startswith(text):
            if child.users:
                return child
            if child.tick > best:
                found, best = child, child.tick
    return found
