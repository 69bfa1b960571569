"""The pages that a request holds: shared pages from the prefix cache first, then its own, in token
order.

If requests also keep a recurrent state, a prefix is shared only up to its deepest page with a
snapshot of the state. If layers have a sliding window, it is shared only up to a page before which
all window pages in sight are cached.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglcore.schedule.cache.free_pages import PagePool
from sglcore.schedule.cache.prefix_cache import Node, PrefixCache
from sglcore.schedule.cache.state_snapshots import Snapshots, restorable
from sglcore.schedule.cache.window_pages import Windows
from sglcore.schedule.request import Request
from sglcore.worker.model_worker import Limits


class Memory:
    """The page pool and the prefix cache. Each page is free, cached, or held by exactly one
    request.

    `takes_snapshots`: requests keep a state and share prefixes through snapshots of it.
    `keeps_windows`: a request takes one window page with each page. `needs_asking`: one of the two
    is true, so a request shares what it computes only if others ask in time.
    """

    def __init__(self, limits: Limits, prefix_cache: bool) -> None:
        self.page_size = limits.page_size
        self.pool = PagePool(limits.num_pages)
        self.cache = PrefixCache(limits.page_size, limits.lookahead)
        self.caches = prefix_cache and (limits.num_snapshots > 0 or not limits.keeps_state)
        self.takes_snapshots = self.caches and limits.keeps_state
        self.snapshots = Snapshots(limits.num_snapshots if self.takes_snapshots else 0)
        self.keeps_windows = limits.num_window_pages > 0
        self.needs_asking = self.takes_snapshots or self.keeps_windows
        self.windows = Windows(limits)
        self.version = 0
        self.hit_tokens = 0
        self.looked_up_tokens = 0
        self.evicted_pages = 0

    @property
    def available(self) -> int:
        """Number of pages that are free, or cached and unused."""
        return self.pool.free + self.cache.num_unused

    @property
    def room(self) -> int:
        """Number of pages that a request can still allocate: `available`, at most the available
        window pages if it takes one with each page."""
        return min(self.available, self.windows.available) if self.keeps_windows else self.available

    def pages_for(self, cells: int) -> int:
        """Return the number of pages that hold `cells` tokens, rounded up."""
        return -(-cells // self.page_size)

    def cached_pages(self, request: Request) -> int:
        """Return how many pages of its known tokens the request could share. Locks nothing."""
        return self._shareable(self._match(request))

    def admit(self, request: Request, promised: int, promised_windows: int = 0) -> bool:
        """Admit the request: lock its cached prefix if the rest of its tokens fits after `promised`
        pages, and `promised_windows` window pages, are reserved. Returns False and changes nothing
        otherwise. The request then has only the pages of the prefix (none if it has embeddings or
        lacks prompt log-probabilities); `grow` allocates the rest."""
        total = request.num_tokens
        known = self._match(request) if self.caches and request.embeds is None else []
        path = [] if request.needs_prefill else known[: self._shareable(known)]
        locked = sum(node.users == 0 for node in path)
        missing = self.pages_for(total) - len(path)
        if missing + promised > self.available - locked:
            return False
        if self.keeps_windows and not self.windows.has_room(path, missing, promised_windows):
            return False
        self.cache.use(path)
        request.node = path[-1] if path else self.cache.root
        request.pages = [node.page for node in path]
        request.shared = len(path)
        request.is_duplicate = False
        request.num_cells = len(path) * self.page_size
        if self.takes_snapshots:
            self.snapshots.restore(request, path[-1] if path else None)
            request.cuts = {pages * self.page_size for pages in self._ends(request, known)}
        if self.keeps_windows:
            self.windows.restore(request, path)
            request.window_ends = self._ends(request, known)
        self.hit_tokens += request.num_cells
        self.looked_up_tokens += total
        return True

    def grow(self, request: Request, count: int) -> bool:
        """Allocate `count` pages for the request, and evict cached pages if needed. Returns False
        and allocates nothing if there are too few.
        """
        missing = count - self.pool.free
        if missing > self.cache.num_unused or (self.keeps_windows and count > self.windows.available):
            return False
        if missing > 0:
            self._evict(missing)
        request.pages += self.pool.take(count)
        if self.keeps_windows:
            self.windows.grow(request, count)
        return True

    def flush(self) -> int:
        """Evict all unused cached pages. Returns their number."""
        self.version += 1
        return self._evict(self.cache.num_unused)

    def offered_pages(self, request: Request, common: int) -> int:
        """Return how many of the request's first `common` pages others will find in the cache
        because this request computes them.
        """
        if self.takes_snapshots:
            is_offered = common > len(request.pages)
        else:
            is_offered = not request.is_duplicate and request.window_first <= self.windows.first_seen(common)
        return common if is_offered else max((end for end in self._expected(request) if end <= common), default=0)

    def will_share(self, request: Request, pages: int) -> bool:
        """Return whether the request will publish its first `pages` pages during its prefill and
        has not yet.
        """
        if self.needs_asking:
            return pages in self._expected(request)
        return request.shared < pages and not request.is_duplicate

    def ask(self, request: Request, pages: int) -> None:
        """Note that others wait for the request's first `pages` pages, a number that
        `offered_pages` returned: it must keep its state (in a snapshot) or its window pages there
        for them.
        """
        if pages > len(request.pages) and self.takes_snapshots:
            request.cuts.add(pages * self.page_size)
        if self.keeps_windows:
            request.window_ends.add(pages)

    def publish(self, request: Request, cells: int) -> None:
        """Share the full pages among the first `cells` tokens, and the snapshots at their ends,
        with other requests. A collected step must have written them.

        If another running request has already published the same page, this request keeps its own
        copy and publishes nothing after it while both run: only the requests that hold a page lock
        it.
        """
        if self.caches and request.embeds is None:
            self._publish(request, cells, leaving=False)

    def release(self, request: Request, cells: int) -> None:
        """Release everything that the request holds: publish the full pages among its first `cells`
        tokens and free the rest. `cells` 0 publishes nothing.

        Call it only after the last step with this request was collected.
        """
        shares = self.caches and request.embeds is None
        duplicates = self._publish(request, cells, leaving=True) if shares else []
        self.pool.give(duplicates)
        self.pool.give(request.pages[request.shared :])
        self.snapshots.release(request)
        self.windows.release(request)
        self.cache.leave(request.node)
        self.version += 1
        request.pages = []
        request.node = None

    def audit(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless each page, snapshot and window page has exactly one owner: it
        is free, a cache node has it, or one of `holders`, all requests with pages. O(num_pages)."""
        holders, nodes = list(holders), self.cache.nodes()
        self.snapshots.audit(holders, nodes)
        self.windows.audit(holders, nodes)
        cached = [node.page for node in nodes]
        held = [page for request in holders for page in request.pages[request.shared :]]
        places = [*self.pool.free_pages(), *cached, *held]
        found = (len(cached), len(places), len(set(places)))
        wanted = (self.cache.num_pages, self.pool.num_pages, self.pool.num_pages)
        assert found == wanted, f"found {found} (cached, pages, distinct pages); wanted {wanted}"
        assert 0 not in places, "page 0 is in use; it belongs to padding rows"

    def _evict(self, count: int) -> int:
        nodes = self.cache.evict(count)
        self.evicted_pages += len(nodes)
        self.pool.give([node.page for node in nodes])
        self.snapshots.withdraw(nodes)
        self.windows.withdraw(nodes)
        return len(nodes)

    def _match(self, request: Request) -> list[Node]:
        return self.cache.match(request.tokens(0, request.num_tokens))

    def _expected(self, request: Request) -> set[int]:
        """Return the page counts after which other requests will continue from this request's
        pages.
        """
        if not self.takes_snapshots:
            return request.window_ends
        return {end // self.page_size for end in request.cuts | (request.snapshots.keys() - {request.spare})}

    def _shareable(self, path: list[Node]) -> int:
        """Return the largest number of leading pages of `path` after which a request can continue:
        its state is in a snapshot there, and all window pages in sight are cached, as far as the
        model has them.
        """
        depth = len(path)
        while True:
            seen = self.windows.reachable(path[:depth]) if self.keeps_windows else depth
            depth = restorable(path[:seen]) if self.takes_snapshots else seen
            if depth == seen:
                return depth

    def _ends(self, request: Request, known: list[Node]) -> set[int]:
        """Return the page counts after which others should be able to continue from this request:
        the end of its common prefix with other requests (`known`: its cached nodes), and the last
        page that a request with the same tokens could share. Counts that it can share from the
        cache already are left out."""
        if not self.caches or request.embeds is not None:
            return set()
        last = (request.num_tokens - max(1, self.cache.lookahead)) // self.page_size
        deepest = self._shareable(known)
        return {pages for pages in (len(known), last) if pages > deepest}

    def _publish(self, request: Request, cells: int, leaving: bool) -> list[int]:
        """Publish the full pages among the first `cells` tokens, with snapshots and window pages.
        Returns the request's pages for which the cache already had one from another request;
        without `leaving`, none."""
        full = (min(cells, request.num_tokens) - self.cache.lookahead) // self.page_size
        duplicates = self._publish_pages(request, full, leaving)
        if request.snapshots:
            self._publish_snapshots(request, full, leaving)
        if self.keeps_windows:
            self._publish_windows(request, full)
        return duplicates

    def _publish_pages(self, request: Request, full: int, leaving: bool) -> list[int]:
        """Publish the request's pages from its last shared page up to page number `full`. At a page
        that another running request has published it stops, or, if the request leaves, takes the
        cache's and goes on; returns its own copies of such pages."""
        size, lookahead = self.page_size, self.cache.lookahead
        node, first = request.node, request.shared
        if full <= first or node is None:
            return []
        tokens = request.tokens(first * size, full * size + lookahead)
        duplicates: list[int] = []
        request.is_duplicate = False
        for index in range(first, full):
            key = self.cache.key(tokens, index - first)
            found = node.children.get(key)
            if found is None:
                found = self.cache.insert(node, key, request.pages[index])
            elif not found.users:
                self.pool.give([self.cache.replace(found, request.pages[index])])
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

    def _publish_snapshots(self, request: Request, full: int, leaving: bool) -> None:
        for end in sorted(request.snapshots):
            if end > full * self.page_size or (end == request.spare and not leaving):
                continue
            pages = end // self.page_size
            (node,) = self._path(request, pages - 1, pages)
            if node is None:
                self.snapshots.keep(request, end)
            else:
                self.snapshots.publish(request, end, node)
                self.version += 1

    def _publish_windows(self, request: Request, full: int) -> None:
        first = min(request.kept_windows, default=request.window_first)
        for index, node in enumerate(self._path(request, first, full), start=first):
            if index in request.kept_windows or index >= request.window_first:
                self.windows.publish(request, index, node)
        request.window_ends = {end for end in request.window_ends if end > full}

    def _path(self, request: Request, first: int, end: int) -> list[Node | None]:
        """Return the cache nodes of the request's pages `first`..`end` - 1, published by any
        request; None where there is none.
        """
        shared, above, node = request.shared, [], request.node
        for _ in range(first, shared):
            above.append(node)
            node = node and node.parent
        nodes, node = above[::-1], request.node
        tokens = request.tokens(shared * self.page_size, end * self.page_size + self.cache.lookahead)
        for index in range(end - shared):
            node = node and node.children.get(self.cache.key(tokens, index))
            nodes.append(node)
        return nodes[max(0, first - shared) :][: max(0, end - first)]
