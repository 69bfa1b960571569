"""The free pages of the KV pool. Page 0 is never allocated: padding rows write to it."""

from __future__ import annotations


class PagePool:
    """Pages 1..num_pages. Allocation and release are O(1) per page."""

    __slots__ = ("_free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Allocate `count` pages. Raises IndexError and allocates none if fewer are free."""
        if count > len(self._free):
            raise IndexError(f"{count} pages wanted, {len(self._free)} are free; evict or retract first")
        if count == 1:
            return [self._free.pop()]
        cut = len(self._free) - count
        taken = self._free[cut:]
        del self._free[cut:]
        return taken

    def give(self, pages: list[int]) -> None:
        """Free pages, which must be allocated; that is not checked."""
        self._free.extend(pages)

    def free_pages(self) -> frozenset[int]:
        """Return the free pages, for audits; O(num_pages)."""
        return frozenset(self._free)
