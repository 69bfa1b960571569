"""Counts of KV entries in host memory (HiSparse)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapCounts:
    """What HiSparse moved between the device and host memory, in one step or in several added up.

    `rows`: entries that layers chose in decode steps; a layer that reuses another layer's choice
    does not count. `hits`: those that were on the device. `loaded` and `stored`: bytes read from
    the host and written to it. `waits`: steps that waited for entries from the host.
    """

    rows: int = 0
    hits: int = 0
    loaded: int = 0
    stored: int = 0
    waits: int = 0

    def __add__(self, other: SwapCounts) -> SwapCounts:
        """Return a new record with the sum of each count."""
        rows, hits, waits = self.rows + other.rows, self.hits + other.hits, self.waits + other.waits
        return SwapCounts(rows, hits, self.loaded + other.loaded, self.stored + other.stored, waits)
