"""Draft tokens from the prefix cache: the tokens that followed the same text in pages that other
requests published.

Lookups do not change the cache: they lock no page and do not affect the eviction order. A page may
be evicted between a lookup and the step. That does no harm: the drafter copies only its tokens, and
the step verifies them.

Cost: while a text follows the same page, one comparison of bytes for each request and step, and one
dictionary lookup for each page that it fills. After the text has left all known pages, one
comparison of numbers until a page is published, and then a search of at most `MOST_LOOKED_AT`
pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from sglcore.schedule.cache.prefix_cache import Node
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.request import Ints, Request, State

NONE = -1
"""Marks the end of the draft tokens of a row: no draft token here or after it."""
MOST_LOOKED_AT = 64
"""Candidate pages after the same text, newest first: the limit keeps the cost of a step independent
of the cache size.
"""
ID_BYTES = np.dtype(np.int32).itemsize


class Standing:
    """Position of a request's text in the cache: its first `pages` pages are cached, and `node` has
    the last of them. `ahead` is the page below `node` that begins with the rest of the text (None:
    none found), and `version` the `Memory.version` at the last look-up.
    """

    __slots__ = ("ahead", "node", "pages", "version")

    def __init__(self, node: Node, pages: int) -> None:
        self.node = node
        self.pages = pages
        self.ahead: Node | None = None
        self.version = -1


class PrefixProposals:
    """Proposes up to `count` draft tokens for each request, from the cached pages of `memory`. It
    keeps the `Standing` of each request until the request ends."""

    def __init__(self, memory: Memory, count: int) -> None:
        self._memory = memory
        self._cache = memory.cache
        self._count = count
        self._standings: dict[Request, Standing] = {}

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended."""
        self._standings.pop(request, None)

    def audit(self) -> None:
        """Raise AssertionError if a request that has ended is still known."""
        kept = [request.rid for request in self._standings if request.state is State.FINISHED]
        assert not kept, f"requests {kept} have ended and still have a position in the prefix cache"

    def propose(self, requests: Sequence[Request]) -> Ints | None:
        """Return int32[B, count]: draft tokens of B running requests, with NONE after the last one
        of a row; None if no request has any. All tokens of the requests must be known.
        """
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
        """Return up to `count` draft tokens for the request; empty if no cached page goes on after
        its text, and for a prompt of embeddings."""
        if request.embeds is not None or request.held.node is None:
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
        """Return the request's known position, unless its page was evicted; otherwise the position
        after the shared pages that the request holds.
        """
        known = self._standings.get(request)
        if known is None or (known.node.parent is None and known.node is not self._cache.root):
            assert request.held.node is not None
            known = self._standings[request] = Standing(request.held.node, request.held.shared)
        return known

    def _descend(self, request: Request, standing: Standing) -> bytes:
        """Move `standing` along the cached pages of the request's text, as far as they reach.
        Returns the bytes of the tokens after the last of them.
        """
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
        """Return up to `count` token ids: those of `node` from byte `begin` of its key, then those
        of the most recently used pages after it."""
        text, wanted, overlap = node.key[begin:], self._count * ID_BYTES, self._cache.lookahead * ID_BYTES
        while len(text) < wanted and (
            following := latest(node, node.key[len(node.key) - overlap :] if overlap else b"")
        ):
            node = following
            text += node.key[overlap:]
        return np.frombuffer(text[:wanted], dtype=np.int32).tolist()


def latest(node: Node, text: bytes) -> Node | None:
    """Return the most recently used child of `node` that has `text` (bytes) as the beginning of its
    key; None if there is none. Pages in use come first, the newest of them before the others. Only
    the MOST_LOOKED_AT newest children are compared."""
    found, best = None, -1
    for child in islice(reversed(node.children.values()), MOST_LOOKED_AT):
        if child.key.startswith(text):
            if child.users:
                return child
            if child.tick > best:
                found, best = child, child.tick
    return found
