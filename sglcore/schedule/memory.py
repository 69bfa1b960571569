"""Which pages a request holds: shared ones from the prefix cache first, then its own, in the order of its cells."""

from __future__ import annotations

from collections.abc import Iterable

from sglcore.device.worker import Limits
from sglcore.schedule.pages import PagePool
from sglcore.schedule.prefix_cache import Node, PrefixCache
from sglcore.schedule.request import Request


class Memory:
    """The pool and the cache together. Every page is free, cached, or held by exactly one request."""

    def __init__(self, limits: Limits, prefix_cache: bool) -> None:
        self.page_size = limits.page_size
        self.pool = PagePool(limits.num_pages)
        self.cache = PrefixCache(limits.page_size, limits.lookahead)
        self.caches = prefix_cache
        self.version = 0
        self.hit_tokens = 0
        self.looked_up_tokens = 0
        self.evicted_pages = 0

    @property
    def available(self) -> int:
        """Pages that are free, or cached and unused."""
        return self.pool.free + self.cache.num_unused

    def pages_for(self, cells: int) -> int:
        """Pages that hold so many cells."""
        return -(-cells // self.page_size)

    def cached_pages(self, request: Request) -> int:
        """Pages of its known tokens that the cache has; locks nothing."""
        return len(self._match(request))

    def admit(self, request: Request, promised: int) -> bool:
        """Give the request its cached prefix if its known tokens fit beside `promised` pages; False changes nothing."""
        total = request.num_tokens
        path = self._match(request) if self.caches and not request.scores_prompt else []
        locked = sum(node.users == 0 for node in path)
        if self.pages_for(total) - len(path) + promised > self.available - locked:
            return False
        self.cache.use(path)
        request.node = path[-1] if path else self.cache.root
        request.pages = [node.page for node in path]
        request.shared = len(path)
        request.is_duplicate = False
        request.num_cells = len(path) * self.page_size
        self.hit_tokens += request.num_cells
        self.looked_up_tokens += total
        return True

    def grow(self, request: Request, count: int) -> bool:
        """Append `count` own pages, evicting cached ones if need be; False, and nothing taken, if there are too few."""
        missing = count - self.pool.free
        if missing > 0:
            if missing > self.cache.num_unused:
                return False
            pages = self.cache.evict(missing)
            self.evicted_pages += len(pages)
            self.pool.give(pages)
        request.pages += self.pool.take(count)
        return True

    def publish(self, request: Request, cells: int) -> None:
        """Let others use the full pages among the first `cells` cells, which a collected ticket has written.

        Where another request was first with the same page, this one keeps its own and publishes nothing after it while
        it runs: a page is locked only by those who hold it.
        """
        if self.caches:
            self._publish(request, cells, leaving=False)

    def release(self, request: Request, cells: int) -> None:
        """Take everything back: publish what the first `cells` cells still offer, free the rest.

        Only after the last ticket that names the request was collected. `cells` 0 publishes nothing more.
        """
        duplicates = self._publish(request, cells, leaving=True) if self.caches else []
        self.pool.give(duplicates)
        self.pool.give(request.pages[request.shared :])
        self.cache.leave(request.node)
        self.version += 1
        request.pages = []
        request.node = None

    def audit(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every page is in exactly one place; O(num_pages)."""
        cached = self.cache.pages()
        held = [page for request in holders for page in request.pages[request.shared :]]
        places = [*self.pool.free_pages(), *cached, *held]
        found = (len(cached), len(places), len(set(places)))
        wanted = (self.cache.num_pages, self.pool.num_pages, self.pool.num_pages)
        assert found == wanted, f"found {found} (cached, pages, distinct pages); wanted {wanted}"
        assert 0 not in places, "page 0 is in use; it belongs to padding rows"

    def _match(self, request: Request) -> list[Node]:
        return self.cache.match(request.tokens(0, request.num_tokens))

    def _publish(self, request: Request, cells: int, leaving: bool) -> list[int]:
        """Walk on from the request's last shared page; returns the pages that the cache had already from others."""
        size, lookahead = self.page_size, self.cache.lookahead
        node, first = request.node, request.shared
        full = (min(cells, request.num_tokens) - lookahead) // size
        if full <= first or node is None:
            return []
        tokens = request.tokens(first * size, full * size + lookahead)
        duplicates: list[int] = []
        for index in range(first, full):
            key = self.cache.key(tokens, index - first)
            found = node.children.get(key)
            if found is None:
                found = self.cache.insert(node, key, request.pages[index])
            elif leaving:
                self.cache.use((found,))
                duplicates.append(request.pages[index])
            else:
                request.is_duplicate = True
                break
            request.node = node = found
            request.shared = index + 1
        self.version += 1
        return duplicates
