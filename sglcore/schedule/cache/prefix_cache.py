"""A radix tree of pages: the prefixes that the KV pool already holds.

The key of a page is its tokens and the `lookahead` tokens after them. A node in use is never
evicted, and neither are the nodes above it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.cache.shared_pages import SharedPages

Ints = NDArray[np.int32]
SLACK = 64


class Node:
    """One published page.

    `users` counts the running requests that have it in their page tables. `snapshot` is the index
    of a copy of the state after its tokens (0: none). `window_page` holds its tokens for
    sliding-window layers (0: none), and `window_users` counts the requests that have that window
    page in their lists.
    """

    __slots__ = ("children", "key", "page", "parent", "snapshot", "tick", "users", "window_page", "window_users")

    def __init__(self, parent: Node | None, key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[bytes, Node] = {}
        self.users = 0
        self.tick = 0
        self.snapshot = 0
        self.window_page = 0
        self.window_users = 0


class PrefixCache:
    """Published pages by prefix. Eviction is least recently used first, and leaves before their
    parents. `shared` (None: pages are of one kind) learns which pages are evictable.
    """

    def __init__(self, page_size: int, lookahead: int, shared: SharedPages | None = None) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.root = Node(None, b"", 0)
        self.num_pages = 0
        self.num_unused = 0
        self.tick = 0
        self._shared = shared
        self._leaves: list[tuple[int, int, Node]] = []
        self._serial = 0

    def key(self, tokens: Ints, index: int) -> bytes:
        """Return the key of page `index` of a token sequence: the bytes of its tokens and of the
        `lookahead` tokens after them, as far as these are known.
        """
        start = index * self.page_size
        return tokens[start : start + self.page_size + self.lookahead].tobytes()

    def match(self, tokens: Ints) -> list[Node]:
        """Return the nodes, first page first, of the longest cached prefix of whole pages that
        leaves at least one token to compute (`lookahead` tokens, if that is more). Locks nothing.
        """
        path: list[Node] = []
        node = self.root
        for index in range((len(tokens) - max(1, self.lookahead)) // self.page_size):
            found = node.children.get(self.key(tokens, index))
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def use(self, nodes: Sequence[Node]) -> None:
        """Add one user to each node."""
        for node in nodes:
            if node.users == 0:
                self.num_unused -= 1
                if self._shared is not None:
                    self._shared.use_page(node.page)
            node.users += 1

    def insert(self, parent: Node, key: bytes, page: int) -> Node:
        """Publish a page below `parent`, which must not have a child with this key; returns its
        node. The request that wrote the page is its first user.
        """
        node = Node(parent, key, page)
        node.users = 1
        parent.children[key] = node
        self.num_pages += 1
        return node

    def leave(self, node: Node | None) -> None:
        """Remove one user from `node` and from all nodes above it. Does nothing for None and for
        the root."""
        self.tick += 1
        while node is not None and node.parent is not None:
            node.users -= 1
            if node.users == 0:
                self.num_unused += 1
                node.tick = self.tick
                if self._shared is not None:
                    self._shared.leave_page(node.page)
                self._offer(node)
            node = node.parent

    def replace(self, node: Node, page: int) -> int:
        """Let the unused node hold `page` instead. The request that wrote `page` becomes its user.
        Returns the node's former page.
        """
        self.use((node,))
        before, node.page = node.page, page
        return before

    def evict(self, count: int) -> list[Node]:
        """Evict up to `count` unused pages, least recently used first. Returns their nodes; the
        caller frees the pages.
        """
        nodes: list[Node] = []
        while len(nodes) < count and self.oldest() is not None:
            _, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            node.parent = None
            if self._shared is not None:
                self._shared.use_page(node.page)
            nodes.append(node)
            self._offer(parent)
        self.num_pages -= len(nodes)
        self.num_unused -= len(nodes)
        return nodes

    def oldest(self) -> int | None:
        """Return the tick at which the page that is evicted next became unused; None if no page can
        be evicted.
        """
        while self._leaves:
            tick, _, node = self._leaves[0]
            if self._evictable(node) and node.tick == tick:
                return tick
            heapq.heappop(self._leaves)
        return None

    def nodes(self) -> list[Node]:
        """Return all published pages, for audits; O(pages)."""
        found, stack = [], list(self.root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def _evictable(self, node: Node) -> bool:
        return node.parent is not None and node.users == 0 and not node.children

    def _offer(self, node: Node) -> None:
        if not self._evictable(node):
            return
        self._serial += 1
        heapq.heappush(self._leaves, (node.tick, self._serial, node))
        if len(self._leaves) > 2 * self.num_pages + SLACK:
            live = {
                id(entry[2]): entry for entry in self._leaves if self._evictable(entry[2]) and entry[2].tick == entry[0]
            }
            self._leaves = sorted(live.values())
