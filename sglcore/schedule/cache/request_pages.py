"""The pages that a request holds: shared pages from the prefix cache first, then its own, in token
order.

If requests also keep a recurrent state, a prefix is shared only up to its deepest page with a
snapshot of the state. If layers have a sliding window, it is shared only up to a page before which
all window pages in sight are cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from sglcore.schedule.cache.free_pages import PagePool
from sglcore.schedule.cache.prefix_cache import Ints, Node, PrefixCache
from sglcore.schedule.cache.shared_pages import FullEnd, SharedPages, make_shared
from sglcore.schedule.cache.state_snapshots import SavedStates, Snapshots, restorable
from sglcore.schedule.cache.window_pages import WindowList, Windows
from sglcore.worker.model_worker import Limits


@dataclass(slots=True)
class Held:
    """What the memory holds for one request. Only this module changes it: `Memory`, and the methods
    here."""

    pages: list[int] = field(default_factory=list)
    """KV pages, in token order."""
    shared: int = 0
    """Number of leading entries of `pages` in the prefix cache, found there or published."""
    node: Node | None = None
    """The prefix cache's node of the last shared page, or the root if none. None: the request holds
    no pages."""
    num_cells: int = 0
    """Number of KV slots that are written once all submitted steps have run. For a decode row,
    `DecodeRows` has this number instead."""
    is_duplicate: bool = False
    """Another running request has published a page that this one has computed too."""
    is_broken: bool = False
    """A step with a row of the request failed or had logits that were not finite. Its KV slots may
    hold anything."""
    prompt_published: bool = False
    """All full pages of the prompt are in the prefix cache."""
    windows: WindowList = field(default_factory=WindowList)
    """Its window pages."""
    states: SavedStates = field(default_factory=SavedStates)
    """Its snapshots."""

    def fill(self, cells: int) -> None:
        """Note that the first `cells` KV slots are written once all submitted steps have run."""
        self.num_cells = cells

    def spoil(self) -> None:
        """Note that a step with a row of the request failed, or had logits that were not finite."""
        self.is_broken = True


class Holder(Protocol):
    """A request as the memory knows it: its tokens, and what it holds."""

    @property
    def held(self) -> Held:
        """What the memory holds for the request."""
        ...

    @property
    def prompt_ids(self) -> Ints:
        """int32[P]: the tokens of the prompt."""
        ...

    @property
    def embeds(self) -> object | None:
        """Embeddings in place of the prompt's tokens. Pages with them are never shared. None: plain
        tokens."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        ...

    @property
    def needs_prefill(self) -> bool:
        """Whether results of the prompt's tokens are still missing, so that cached pages cannot
        replace the prefill."""
        ...

    def tokens(self, start: int, end: int) -> Ints:
        """Return the known tokens start..end-1, int32; fewer if not all are known."""
        ...


class Memory:
    """The page pool and the prefix cache. Each page is free, cached, or held by exactly one
    request.

    `takes_snapshots`: requests keep a state and share prefixes through snapshots of it.
    `keeps_windows`: a request takes one window page with each page. `needs_asking`: one of the two
    is true, so a request shares what it computes only if others ask in time. `shared`: the pages
    that both kinds share (None: window pages, if any, have a pool of their own).
    """

    def __init__(self, limits: Limits, prefix_cache: bool) -> None:
        self.page_size = limits.page_size
        self.shared = shared = make_shared(limits)
        self.pool = PagePool(limits.num_pages) if shared is None else FullEnd(shared)
        self.cache = PrefixCache(limits.page_size, limits.lookahead, shared)
        self.caches = prefix_cache and (limits.num_snapshots > 0 or not limits.keeps_state)
        self.takes_snapshots = self.caches and limits.keeps_state
        self.snapshots = Snapshots(limits.num_snapshots if self.takes_snapshots else 0)
        self.keeps_windows = limits.num_window_pages > 0
        self.needs_asking = self.takes_snapshots or self.keeps_windows
        self.windows = Windows(limits, shared, lambda: self.cache.tick)
        self.version = 0
        self.hit_tokens = 0
        self.looked_up_tokens = 0
        self.evicted_pages = 0

    @property
    def available(self) -> int:
        """Number of pages that are free, or would be after evictions."""
        if self.shared is not None:
            return self.shared.open.most(0, self.shared.unit)
        return self.pool.free + self.cache.num_unused

    @property
    def room(self) -> int:
        """Number of pages that a request can still allocate: `available`, at most the available
        window pages if it takes one with each page."""
        if self.shared is not None:
            return self.shared.open.pairs(self.shared.unit)
        return min(self.available, self.windows.available) if self.keeps_windows else self.available

    def pages_for(self, cells: int) -> int:
        """Return the number of pages that hold `cells` tokens, rounded up."""
        return -(-cells // self.page_size)

    def cached_pages(self, request: Holder) -> int:
        """Return how many pages of its known tokens the request could share. Locks nothing."""
        return self._shareable(self._match(request))

    def admit(self, request: Holder, promised: int, promised_windows: int = 0) -> bool:
        """Admit the request: lock its cached prefix if the rest of its tokens fits after `promised`
        pages, and `promised_windows` window pages, are reserved. Returns False and changes nothing
        otherwise. The request then has only the pages of the prefix (none if it has embeddings or
        lacks prompt log-probabilities); `grow` allocates the rest."""
        total = request.num_tokens
        known = self._match(request) if self.caches and request.embeds is None else []
        path = [] if request.needs_prefill else known[: self._shareable(known)]
        if not self._has_room(path, self.pages_for(total) - len(path), promised, promised_windows):
            return False
        self.cache.use(path)
        held = request.held
        held.node = path[-1] if path else self.cache.root
        held.pages = [node.page for node in path]
        held.shared = len(path)
        held.is_duplicate = False
        held.num_cells = len(path) * self.page_size
        if self.takes_snapshots:
            cuts = {pages * self.page_size for pages in self._ends(request, known)}
            self.snapshots.restore(held.states, path[-1] if path else None, cuts)
        if self.keeps_windows:
            self.windows.restore(held.windows, path, self._ends(request, known))
        self.hit_tokens += held.num_cells
        self.looked_up_tokens += total
        return True

    def grow(self, request: Holder, count: int) -> bool:
        """Allocate `count` pages for the request, and evict cached pages if needed. Returns False
        and allocates nothing if there are too few.
        """
        if not self.fits(count):
            return False
        if self.shared is not None:
            self._make_room(count)
        elif count > self.pool.free:
            self._evict(count - self.pool.free)
        request.held.pages += self.pool.take(count)
        if self.keeps_windows:
            self.windows.grow(request.held.windows, count)
        return True

    def save(self, request: Holder, end: int) -> int:
        """Return the snapshot that receives the request's state in the step that ends at `end`
        tokens, a page multiple; 0 for none. Prompts of embeddings save none: the prefix cache never
        matches them.
        """
        return 0 if request.embeds is not None else self.snapshots.save(request.held.states, end)

    def fits(self, count: int, back: int = 0, windows_back: int = 0) -> bool:
        """Return whether a request can take `count` more pages, each with a window page if it takes
        these, evictions included.

        `back` pages and `windows_back` window pages are said to come back before. If any do and
        both kinds share memory, the answer may be wrongly True.
        """
        if self.shared is not None:
            return self.shared.will_fit(count, count, back, windows_back)
        has_windows = not self.keeps_windows or count <= self.windows.available + windows_back
        return has_windows and count <= self.available + back

    def flush(self) -> int:
        """Evict all unused cached pages. Returns their number."""
        self.version += 1
        return self._evict(self.cache.num_unused)

    def offered_pages(self, request: Holder, common: int) -> int:
        """Return how many of the request's first `common` pages others will find in the cache
        because this request computes them.
        """
        held = request.held
        if self.takes_snapshots:
            is_offered = common > len(held.pages)
        else:
            is_offered = not held.is_duplicate and held.windows.first <= self.windows.first_seen(common)
        return common if is_offered else max((end for end in self._expected(held) if end <= common), default=0)

    def will_share(self, request: Holder, pages: int) -> bool:
        """Return whether the request will publish its first `pages` pages during its prefill and
        has not yet.
        """
        held = request.held
        if self.needs_asking:
            return pages in self._expected(held)
        return held.shared < pages and not held.is_duplicate

    def ask(self, request: Holder, pages: int) -> None:
        """Note that others wait for the request's first `pages` pages, a number that
        `offered_pages` returned: it must keep its state (in a snapshot) or its window pages there
        for them.
        """
        held = request.held
        if pages > len(held.pages) and self.takes_snapshots:
            self.snapshots.ask(held.states, pages * self.page_size)
        if self.keeps_windows:
            self.windows.ask(held.windows, pages)

    def publish(self, request: Holder, cells: int) -> None:
        """Share the full pages among the first `cells` tokens, and the snapshots at their ends,
        with other requests. A collected step must have written them.

        If another running request has already published the same page, this request keeps its own
        copy and publishes nothing after it while both run: only the requests that hold a page lock
        it.
        """
        if self.caches and request.embeds is None:
            self._publish(request, cells, leaving=False)
        held = request.held
        held.prompt_published = held.prompt_published or cells >= len(request.prompt_ids)

    def release(self, request: Holder, cells: int) -> None:
        """Release everything that the request holds: publish the full pages among its first `cells`
        tokens and free the rest. `cells` 0 publishes nothing.

        Call it only after the last step with this request was collected.
        """
        held = request.held
        shares = self.caches and request.embeds is None
        duplicates = self._publish(request, cells, leaving=True) if shares else []
        self.pool.give(duplicates)
        self.pool.give(held.pages[held.shared :])
        self.snapshots.release(held.states)
        self.windows.release(held.windows)
        self.cache.leave(held.node)
        self.version += 1
        held.pages = []
        held.node = None

    def audit(self, holders: Iterable[Holder]) -> None:
        """Raise AssertionError unless each page, snapshot and window page has exactly one owner: it
        is free, a cache node has it, or one of `holders`, all requests with pages. O(num_pages)."""
        records, nodes = [request.held for request in holders], self.cache.nodes()
        self.snapshots.audit([held.states for held in records], nodes)
        self.windows.audit([held.windows for held in records], nodes)
        if self.shared is not None:
            self._audit_shared(self.shared, records, nodes)
            return
        cached = [node.page for node in nodes]
        own = [page for held in records for page in held.pages[held.shared :]]
        places = [*self.pool.free_pages(), *cached, *own]
        found = (len(cached), len(places), len(set(places)))
        wanted = (self.cache.num_pages, self.pool.num_pages, self.pool.num_pages)
        assert found == wanted, f"found {found} (cached, pages, distinct pages); wanted {wanted}"
        assert 0 not in places, "page 0 is in use; it belongs to padding rows"

    def _audit_shared(self, shared: SharedPages, records: list[Held], nodes: list[Node]) -> None:
        own = [page for held in records for page in held.pages[held.shared :]]
        used = [*own, *(node.page for node in nodes if node.users)]
        idle = [node.page for node in nodes if not node.users]
        assert (len(nodes), len(idle)) == (self.cache.num_pages, self.cache.num_unused), "cached pages"
        shared.audit(used, idle, self.windows.in_use([held.windows for held in records]), self.windows.unused)

    def _has_room(self, path: list[Node], missing: int, promised: int, promised_windows: int) -> bool:
        """Return whether a request can start after `path` and continue with `missing` more pages
        while `promised` pages and `promised_windows` window pages are reserved for others.
        """
        unused = [node.page for node in path if node.users == 0]
        if self.shared is not None:
            windows = self.windows.wanted(path, missing) + promised_windows
            return self.shared.fits_after(missing + promised, windows, unused, self.windows.unused_in_sight(path))
        if missing + promised > self.available - len(unused):
            return False
        return not self.keeps_windows or self.windows.has_room(path, missing, promised_windows)

    def _make_room(self, count: int) -> None:
        """Evict pages of both kinds, least recently used first, until `count` pages and `count`
        window pages are free. `fits(count)` must be true.
        """
        assert self.shared is not None
        while not self.shared.is_free(count, count):
            page, window = self.cache.oldest(), self.windows.oldest
            if not self.shared.helps_window(count):
                window = None
            if page is None or (window is not None and window < page):
                self.windows.evict()
            else:
                self._evict(1)

    def _evict(self, count: int) -> int:
        nodes = self.cache.evict(count)
        self.evicted_pages += len(nodes)
        self.pool.give([node.page for node in nodes])
        self.snapshots.withdraw(nodes)
        self.windows.withdraw(nodes)
        return len(nodes)

    def _match(self, request: Holder) -> list[Node]:
        return self.cache.match(request.tokens(0, request.num_tokens))

    def _expected(self, held: Held) -> set[int]:
        """Return the page counts after which other requests will continue from a request's
        pages.
        """
        if not self.takes_snapshots:
            return held.windows.ends
        states = held.states
        return {end // self.page_size for end in states.cuts | (states.places.keys() - {states.spare})}

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

    def _ends(self, request: Holder, known: list[Node]) -> set[int]:
        """Return the page counts after which others should be able to continue from this request:
        the end of its common prefix with other requests (`known`: its cached nodes), and the last
        page that a request with the same tokens could share. Counts that it can share from the
        cache already are left out."""
        if not self.caches or request.embeds is not None:
            return set()
        last = (request.num_tokens - max(1, self.cache.lookahead)) // self.page_size
        deepest = self._shareable(known)
        return {pages for pages in (len(known), last) if pages > deepest}

    def _publish(self, request: Holder, cells: int, leaving: bool) -> list[int]:
        """Publish the full pages among the first `cells` tokens, with snapshots and window pages.
        Returns the request's pages for which the cache already had one from another request;
        without `leaving`, none."""
        full = (min(cells, request.num_tokens) - self.cache.lookahead) // self.page_size
        duplicates = self._publish_pages(request, full, leaving)
        if request.held.states.places:
            self._publish_snapshots(request, full, leaving)
        if self.keeps_windows:
            self._publish_windows(request, full)
        return duplicates

    def _publish_pages(self, request: Holder, full: int, leaving: bool) -> list[int]:
        """Publish the request's pages from its last shared page up to page number `full`. At a page
        that another running request has published it stops, or, if the request leaves, takes the
        cache's and goes on; returns its own copies of such pages."""
        size, lookahead, held = self.page_size, self.cache.lookahead, request.held
        node, first = held.node, held.shared
        if full <= first or node is None:
            return []
        tokens = request.tokens(first * size, full * size + lookahead)
        duplicates: list[int] = []
        held.is_duplicate = False
        for index in range(first, full):
            key = self.cache.key(tokens, index - first)
            found = node.children.get(key)
            if found is None:
                found = self.cache.insert(node, key, held.pages[index])
            elif not found.users:
                self.pool.give([self.cache.replace(found, held.pages[index])])
            elif leaving:
                self.cache.use((found,))
                duplicates.append(held.pages[index])
            else:
                held.is_duplicate = True
                break
            held.node = node = found
            held.shared = index + 1
        self.version += 1
        return duplicates

    def _publish_snapshots(self, request: Holder, full: int, leaving: bool) -> None:
        states = request.held.states
        for end in sorted(states.places):
            if end > full * self.page_size or (end == states.spare and not leaving):
                continue
            pages = end // self.page_size
            (node,) = self._path(request, pages - 1, pages)
            if node is None:
                self.snapshots.keep(states, end)
            else:
                self.snapshots.publish(states, end, node)
                self.version += 1

    def _publish_windows(self, request: Holder, full: int) -> None:
        windows = request.held.windows
        first = min(windows.kept, default=windows.first)
        for index, node in enumerate(self._path(request, first, full), start=first):
            if index in windows.kept or index >= windows.first:
                self.windows.publish(windows, index, node)
        self.windows.end_publishing(windows, full)

    def _path(self, request: Holder, first: int, end: int) -> list[Node | None]:
        """Return the cache nodes of the request's pages `first`..`end` - 1, published by any
        request; None where there is none.
        """
        shared, above, node = request.held.shared, [], request.held.node
        for _ in range(first, shared):
            above.append(node)
            node = node and node.parent
        nodes, node = above[::-1], request.held.node
        tokens = request.tokens(shared * self.page_size, end * self.page_size + self.cache.lookahead)
        for index in range(end - shared):
            node = node and node.children.get(self.cache.key(tokens, index))
            nodes.append(node)
        return nodes[max(0, first - shared) :][: max(0, end - first)]
