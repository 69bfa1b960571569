"""Pages that keep either all tokens or sliding windows: two kinds of pages with one budget.

The storage is cut into blocks of `unit` pages. A block is free, or has pages of all tokens, or is
one window page, which has the number of the block's first page. Block 0 belongs to padding rows.
Pages of all tokens come from the lowest block at the start and window pages from the highest, so
both kinds grow towards each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from sglcore.worker.model_worker import Limits, least_shared_pages, most_window_pages, reserved_windows


@dataclass(slots=True)
class Room:
    """What a set of pages can become: pages of all tokens, or window pages of a block each.

    `pages`: number of pages. `blocks`: whole blocks among these. `growth`: how many of these may
    get pages of all tokens; the others are reserved for window pages.
    """

    pages: int
    blocks: int
    growth: int

    def most(self, windows: int, unit: int) -> int:
        """Return how many pages of all tokens fit next to `windows` window pages of `unit` pages
        each. `windows` must not be more than `blocks`.
        """
        return self.pages - unit * max(windows, self.blocks - self.growth)

    def fits(self, pages: int, windows: int, unit: int) -> bool:
        """Return whether `pages` pages of all tokens and `windows` window pages, of `unit` pages
        each, fit at the same time.
        """
        return windows <= self.blocks and pages <= self.most(windows, unit)

    def pairs(self, unit: int) -> int:
        """Return how many times one page of all tokens and one window page fit together."""
        return max(0, min(self.blocks, self.most(0, unit), self.pages // (1 + unit)))


class SharedPages:
    """Who may take which page. Allocation and release are O(1) per page.

    A taken page is in use, or evictable: the prefix cache has it and no request uses it. `free`:
    the room in free pages. `open`: the room in pages that are free or evictable. `unit`: pages of a
    block. So many blocks as are reserved never have pages of all tokens: these lie scattered over
    blocks, and a request must find whole blocks for its window pages nevertheless.
    """

    def __init__(self, num_pages: int, unit: int, reserved: int) -> None:
        """`num_pages` is the highest page number. The pages after the last whole block stay
        unused. `reserved`: number of reserved blocks.
        """
        self.unit = unit
        self.num_blocks = (num_pages + 1) // unit - 1
        self._most_full = self.num_blocks - reserved
        self.free = Room(self.num_pages, self.num_blocks, self._most_full)
        self.open = copy(self.free)
        self._blocks = deque(range(1, self.num_blocks + 1))
        self._partial: dict[int, list[int]] = {}
        self._used = [0] * (self.num_blocks + 1)

    @property
    def num_pages(self) -> int:
        """Number of pages that can be taken."""
        return self.unit * self.num_blocks

    def is_free(self, pages: int, windows: int) -> bool:
        """Return whether so many pages and window pages are free now."""
        return self.free.fits(pages, windows, self.unit)

    def helps_window(self, count: int) -> bool:
        """Return whether a free window page more brings `count` pages and `count` window pages
        nearer. It does not if window pages suffice and pages are limited by the reserved blocks.
        """
        return self.free.blocks < count or self.free.blocks - self.free.growth < count

    def fits_after(self, pages: int, windows: int, used: Sequence[int], used_windows: Sequence[int]) -> bool:
        """Return whether so many pages and window pages are free, or would be after evictions, if
        the evictable pages `used` and the evictable window pages `used_windows` were in use.
        """
        blocks = len({page // self.unit for page in used if not self._used[page // self.unit]})
        gone = len(used) + self.unit * len(used_windows)
        left = Room(self.open.pages - gone, self.open.blocks - blocks - len(used_windows), self.open.growth - blocks)
        return left.fits(pages, windows, self.unit)

    def will_fit(self, pages: int, windows: int, back: int = 0, windows_back: int = 0) -> bool:
        """Return whether so many pages and window pages are free, or would be after evictions, when
        `back` pages and `windows_back` window pages are no longer in use.

        Exact if `back` is 0; otherwise it may be wrongly True, because the blocks of these pages
        are unknown.
        """
        room, gone = self.open, back + windows_back
        more = Room(room.pages + back + self.unit * windows_back, room.blocks + gone, room.growth + back)
        return more.fits(pages, windows, self.unit)

    def take_pages(self, count: int) -> list[int]:
        """Take `count` pages of all tokens, which are then in use. Raises IndexError and takes none
        if fewer are free.
        """
        if count > self.free.most(0, self.unit):
            raise IndexError(f"{count} pages wanted, {self.free.most(0, self.unit)} are free; evict or retract first")
        taken = [self._take_page() for _ in range(count)]
        for page in taken:
            self.use_page(page)
        return taken

    def give_pages(self, pages: Iterable[int]) -> None:
        """Free pages of all tokens, which must be in use; that is not checked."""
        for page in pages:
            self.leave_page(page)
            self._give_page(page)

    def take_windows(self, count: int) -> list[int]:
        """Take `count` window pages, which are then in use. Raises IndexError and takes none if
        fewer are free.
        """
        if count > self.free.blocks:
            raise IndexError(f"{count} window pages wanted, {self.free.blocks} are free; evict or retract first")
        taken = [self._blocks.pop() * self.unit for _ in range(count)]
        self._count(self.free, -count)
        for window in taken:
            self.use_window(window)
        return taken

    def give_windows(self, windows: Sequence[int]) -> None:
        """Free window pages, which must be in use; that is not checked."""
        for window in windows:
            self.leave_window(window)
            self._blocks.append(window // self.unit)
        self._count(self.free, len(windows))

    def use_page(self, page: int) -> None:
        """Note that a taken page is no longer evictable."""
        block = page // self.unit
        self.open.pages -= 1
        if not self._used[block]:
            self.open.blocks -= 1
            self.open.growth -= 1
        self._used[block] += 1

    def leave_page(self, page: int) -> None:
        """Note that a taken page has become evictable."""
        block = page // self.unit
        self._used[block] -= 1
        self.open.pages += 1
        if not self._used[block]:
            self.open.blocks += 1
            self.open.growth += 1

    def use_window(self, window: int) -> None:
        """Note that a taken window page is no longer evictable."""
        self._used[window // self.unit] = self.unit
        self._count(self.open, -1)

    def leave_window(self, window: int) -> None:
        """Note that a taken window page has become evictable."""
        self._used[window // self.unit] = 0
        self._count(self.open, 1)

    def free_pages(self) -> list[int]:
        """Return the free pages, for audits; O(num_pages)."""
        whole = [page for block in self._blocks for page in self.pages_of(block * self.unit)]
        return [*whole, *(page for pages in self._partial.values() for page in pages)]

    def pages_of(self, window: int) -> range:
        """Return the pages that a window page consists of."""
        return range(window, window + self.unit)

    def audit(
        self, used: Sequence[int], idle: Sequence[int], windows: Sequence[int], idle_windows: Sequence[int]
    ) -> None:
        """Raise AssertionError unless each page is free or occurs exactly once among `used` and
        evictable (`idle`) pages of all tokens, and `windows` and `idle_windows`, the window pages
        in use and evictable. O(num_pages).
        """
        in_windows = [page for each in [*windows, *idle_windows] for page in self.pages_of(each)]
        places = sorted([*self.free_pages(), *used, *idle, *in_windows])
        wanted = list(range(self.unit, self.unit * (self.num_blocks + 1)))
        assert places == wanted, f"shared pages lost or held twice: {places}"
        for room, pages, blocks in ((self.open, used, windows), (self.free, [*used, *idle], [*windows, *idle_windows])):
            full = len({page // self.unit for page in pages})
            left = self.num_pages - len(pages) - self.unit * len(blocks)
            found = Room(left, self.num_blocks - full - len(blocks), self._most_full - full)
            assert found == room, f"the room is {found}; counted {room}"
            assert found.growth >= 0, f"pages of all tokens are in {full} blocks; {self._most_full} are not reserved"

    def _count(self, room: Room, change: int) -> None:
        """Count whole blocks into a room, or out of it (`change` negative)."""
        room.blocks += change
        room.pages += change * self.unit

    def _take_page(self) -> int:
        """Take a page of a block that has others, or else of the next free block."""
        self.free.pages -= 1
        if not self._partial:
            block = self._blocks.popleft()
            self.free.blocks -= 1
            self.free.growth -= 1
            if self.unit == 1:
                return block
            self._partial[block] = list(reversed(self.pages_of(block * self.unit)))
        block, pages = next(iter(self._partial.items()))
        page = pages.pop()
        if not pages:
            del self._partial[block]
        return page

    def _give_page(self, page: int) -> None:
        self.free.pages += 1
        block = page // self.unit
        pages = [page] if self.unit == 1 else self._partial.setdefault(block, [])
        if self.unit > 1:
            pages.append(page)
        if len(pages) == self.unit:
            self._partial.pop(block, None)
            self._blocks.appendleft(block)
            self.free.blocks += 1
            self.free.growth += 1


def make_shared(limits: Limits) -> SharedPages | None:
    """Return the pages of a worker if both kinds share memory; None if they do not."""
    if not limits.window_unit:
        return None
    reserved = reserved_windows(least_window_pages(limits), limits.window_unit)
    return SharedPages(limits.num_pages, limits.window_unit, reserved)


def least_pages(limits: Limits) -> int:
    """Return the least `num_pages` of a worker, if both kinds of pages share memory."""
    longest = -(-limits.max_model_len // limits.page_size)
    return least_shared_pages(longest, least_window_pages(limits), limits.window_unit)


def least_window_pages(limits: Limits) -> int:
    """Return the minimum number of window pages of a worker: the most that one request's list may
    have.
    """
    return most_window_pages(limits.window, limits.max_batch_tokens, limits.page_size, limits.lookahead)


class FullEnd:
    """The pages of all tokens among `SharedPages`, with the methods of a `PagePool`."""

    __slots__ = ("_shared",)

    def __init__(self, shared: SharedPages) -> None:
        self._shared = shared

    @property
    def num_pages(self) -> int:
        """Number of pages of both kinds."""
        return self._shared.num_pages

    @property
    def free(self) -> int:
        """Number of free pages that may become pages of all tokens."""
        return self._shared.free.most(0, self._shared.unit)

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages. Raises IndexError and allocates none if fewer are free."""
        return self._shared.take_pages(count)

    def give(self, pages: list[int]) -> None:
        """Free pages, which must be in use; that is not checked."""
        self._shared.give_pages(pages)

    def free_pages(self) -> frozenset[int]:
        """Return the free pages, for audits; O(num_pages)."""
        return frozenset(self._shared.free_pages())


class WindowEnd:
    """The window pages among `SharedPages`, with the methods of a `PagePool`."""

    __slots__ = ("_shared",)

    def __init__(self, shared: SharedPages) -> None:
        self._shared = shared

    @property
    def num_pages(self) -> int:
        """Number of window pages if there were no pages of all tokens."""
        return self._shared.num_blocks

    @property
    def free(self) -> int:
        """Number of free window pages."""
        return self._shared.free.blocks

    def take(self, count: int) -> list[int]:
        """Allocate `count` window pages. Raises IndexError and allocates none if fewer are
        free.
        """
        return self._shared.take_windows(count)

    def give(self, pages: list[int]) -> None:
        """Free window pages, which must be in use; that is not checked."""
        self._shared.give_windows(pages)

    def free_pages(self) -> frozenset[int]:
        """Return the first pages of all free blocks, for audits; O(num_pages)."""
        free, unit = set(self._shared.free_pages()), self._shared.unit
        return frozenset(each for each in free if each % unit == 0 and free.issuperset(self._shared.pages_of(each)))
