"""Window pages: KV pages of sliding-window layers, in a pool of their own and only for the tokens
in sight.

A request has a list of them, one for each of its pages from the first one in sight of its next
token. A node of the prefix cache may also hold one with the tokens of its page. A prefix is shared
up to a page before which all window pages in sight are cached. The worker takes lists in the order
of the steps, so a page is free for others as soon as no later planned step lists it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglcore.schedule.cache.free_pages import PagePool
from sglcore.schedule.cache.prefix_cache import Node
from sglcore.schedule.cache.shared_pages import SharedPages, WindowEnd
from sglcore.worker.model_worker import Limits


@dataclass(slots=True)
class WindowList:
    """The window pages of one request. Only `Windows` changes it."""

    first: int = 0
    """Index of the first page of the request that `pages` covers."""
    pages: list[int] = field(default_factory=list)
    """Window pages, one for each page of the request from page `first` on."""
    ends: set[int] = field(default_factory=set)
    """Numbers of leading pages after which other requests should be able to continue."""
    kept: dict[int, int] = field(default_factory=dict)
    """Window pages that left `pages` and will be published: page index to window page."""


class Windows:
    """Window pages 1..num_pages. Each is free, or belongs to a node (`Node.window_page`) or to one
    request (`WindowList`).

    Requests may use a node's page through their lists. Unused pages of nodes are evicted when pages
    are needed, least recently used first. `span`: most pages in a request's list, without those of
    a step's chunk. `kept`: number of pages in `WindowList.kept` of all requests.
    """

    def __init__(self, limits: Limits, shared: SharedPages | None = None, clock: Callable[[], int] = lambda: 0) -> None:
        """`shared`: the pages that all kinds of pages share (None: window pages have a pool of
        their own). `clock` returns the tick of the prefix cache.
        """
        self.span = -(-(limits.window - 1) // limits.page_size) + 1 + -(-limits.lookahead // limits.page_size)
        self.evicted = 0
        self.kept = 0
        self._page_size = limits.page_size
        self._lookahead = limits.lookahead
        self._seen = limits.window - 1
        self._shared, self._clock = shared, clock
        self._pool = PagePool(limits.num_window_pages) if shared is None else WindowEnd(shared)
        self.num_pages = self._pool.num_pages
        self._nodes: dict[int, Node] = {}
        self._unused: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Number of free window pages."""
        return self._pool.free

    @property
    def cached(self) -> int:
        """Number of window pages that belong to nodes."""
        return len(self._nodes)

    @property
    def available(self) -> int:
        """Number of window pages that are free, or would be after evictions."""
        if self._shared is not None:
            return self._shared.open.blocks
        return self._pool.free + self.num_unused

    @property
    def oldest(self) -> int | None:
        """The tick at which the page that is evicted next became unused. None: no page can be
        evicted.
        """
        return next(iter(self._unused.values()), None)

    def first_seen(self, pages: int) -> int:
        """Return the index of the page with the first token in sight of the token after `pages`
        pages.
        """
        return max(0, pages * self._page_size - self._seen) // self._page_size

    def reachable(self, path: Sequence[Node]) -> int:
        """Return the largest number of leading pages of `path` after which a request can continue,
        because all window pages in sight of its next token are cached.
        """
        depth = index = len(path)
        while index > self.first_seen(depth):
            index -= 1
            if not path[index].window_page:
                depth = index
        return depth

    def has_room(self, path: Sequence[Node], missing: int, promised: int) -> bool:
        """Return whether a request can start after `path` and continue with `missing` more pages
        while `promised` pages are reserved for others.
        """
        wanted = self.wanted(path, missing) + promised
        return wanted <= self.available - len(self.unused_in_sight(path))

    def wanted(self, path: Sequence[Node], missing: int) -> int:
        """Return how many more window pages a request takes that starts after `path` and continues
        with `missing` more pages.
        """
        return min(missing, self.span - (len(path) - self.first_seen(len(path))))

    def unused_in_sight(self, path: Sequence[Node]) -> list[int]:
        """Return the window pages in sight after `path` that no request uses."""
        return [node.window_page for node in path[self.first_seen(len(path)) :] if not node.window_users]

    def restore(self, held: WindowList, path: Sequence[Node], ends: set[int]) -> None:
        """Start a request's list with the window pages in sight after `path`. `ends`: numbers of
        leading pages after which other requests should be able to continue.
        """
        held.first = self.first_seen(len(path))
        seen = path[held.first :]
        held.pages = [node.window_page for node in seen]
        held.ends = ends
        for node in seen:
            self._use(node.window_page)
            node.window_users += 1

    def ask(self, held: WindowList, end: int) -> None:
        """Note that others wait to continue after the first `end` pages of a request."""
        held.ends.add(end)

    def grow(self, held: WindowList, count: int) -> None:
        """Append `count` pages to a request's list; unused pages of nodes are evicted if needed.
        At least `count` must be `available`, and of shared pages they must be free.
        """
        for _ in range(count - self._pool.free if self._shared is None else 0):
            self.evict()
        held.pages += self._pool.take(count)

    def slide(self, held: WindowList, cells: int) -> bool:
        """Remove from a request's list the pages that steps after `cells` tokens do not see.
        Returns False if all are in sight.

        Others may continue after the last complete page, so the pages in sight from there stay.
        Pages that the cache should get for others are kept until they are published.
        """
        first = self.first_seen((cells - self._lookahead) // self._page_size)
        count = first - held.first
        if count <= 0:
            return False
        wanted = {index for end in held.ends for index in range(self.first_seen(end), end)}
        for index, page in enumerate(held.pages[:count], start=held.first):
            if index in wanted and page not in self._nodes:
                held.kept[index] = page
                self.kept += 1
            else:
                self._drop(page)
        del held.pages[:count]
        held.first = first
        return True

    def publish(self, held: WindowList, index: int, node: Node | None) -> None:
        """Share a request's window page for its page `index` with `node`, if the node has none
        (`node` None: that page is not cached). A collected step must have written it.
        """
        is_kept = index in held.kept
        page = held.kept.pop(index) if is_kept else held.pages[index - held.first]
        self.kept -= is_kept
        if node is not None and not node.window_page:
            node.window_page, node.window_users = page, 1
            self._nodes[page] = node
        if is_kept:
            self._drop(page)

    def end_publishing(self, held: WindowList, full: int) -> None:
        """Note that the pages of a request before its page `full` have been published."""
        held.ends = {end for end in held.ends if end > full}

    def withdraw(self, nodes: Iterable[Node]) -> None:
        """Release the window pages of evicted nodes: they are free, or belong to the request that
        still uses them.
        """
        for node in nodes:
            if node.window_page:
                del self._nodes[node.window_page]
                if not node.window_users:
                    self._use(node.window_page)
                    self._pool.give([node.window_page])

    def release(self, held: WindowList) -> None:
        """Take all window pages from a request: its own become free, and those of nodes lose one
        user.
        """
        for page in [*held.kept.values(), *held.pages]:
            self._drop(page)
        self.kept -= len(held.kept)
        held.kept.clear()
        held.pages = []

    def audit(self, lists: Iterable[WindowList], nodes: Iterable[Node]) -> None:
        """Raise AssertionError unless each page has exactly one owner and its users are counted.
        `lists`: those of all requests with pages; `nodes`: all those of the cache. O(pages). Owners
        of shared pages are checked by `SharedPages.audit`."""
        lists = list(lists)
        cached = {node.window_page: node for node in nodes if node.window_page}
        assert cached == self._nodes, f"nodes have window pages {sorted(cached)}; wanted {sorted(self._nodes)}"
        listed = [page for held in lists for page in held.pages]
        counts = Counter(listed)
        users = {page: counts[page] for page in cached}
        assert users == {page: node.window_users for page, node in cached.items()}, f"window pages' users are {users}"
        assert self._unused.keys() == {page for page, count in users.items() if not count}, "unused window pages"
        kept = [page for held in lists for page in held.kept.values()]
        assert len(kept) == self.kept, f"{len(kept)} window pages are kept, {self.kept} are counted"
        if self._shared is not None:
            return
        own = [page for page in listed if page not in cached]
        places = sorted([*self._pool.free_pages(), *cached, *own, *kept])
        assert places == list(range(1, self.num_pages + 1)), f"window pages lost or held twice: {places}"

    def in_use(self, lists: Iterable[WindowList]) -> list[int]:
        """Return the pages that requests use or keep, each once unless it has two owners; `lists`
        are those of all requests with pages.
        """
        lists = list(lists)
        listed = [page for held in lists for page in held.pages]
        kept = [page for held in lists for page in held.kept.values()]
        used = [page for page, node in self._nodes.items() if node.window_users]
        return [*kept, *used, *(page for page in listed if page not in self._nodes)]

    @property
    def num_unused(self) -> int:
        """Number of pages of nodes that no request uses."""
        return len(self._unused)

    @property
    def unused(self) -> list[int]:
        """The pages of nodes that no request uses, least recently used first."""
        return list(self._unused)

    def evict(self) -> None:
        """Free the least recently used unused page of a node. There must be one."""
        page = next(iter(self._unused))
        self._use(page)
        self._nodes.pop(page).window_page = 0
        self._pool.give([page])
        self.evicted += 1

    def _use(self, page: int) -> None:
        """Note that an unused page of a node is no longer unused. Does nothing for others."""
        if self._unused.pop(page, None) is not None and self._shared is not None:
            self._shared.use_window(page)

    def _drop(self, page: int) -> None:
        """Remove one user of a node's page, or free a request's own page."""
        node = self._nodes.get(page)
        if node is None:
            self._pool.give([page])
            return
        node.window_users -= 1
        if not node.window_users:
            # A request drops its window pages just before its other pages, which then have the
            # same tick.
            self._unused[page] = self._clock() + 1
            if self._shared is not None:
                self._shared.leave_window(page)
