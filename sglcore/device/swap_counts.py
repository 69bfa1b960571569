"""What a worker counts of rows that lie in host memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapCounts:
    """What came of rows in host memory: `rows` that layers chose in decode steps, a layer that reads what another chose counted not
    again, and `hits`, those that were on the device; bytes that were `loaded` from the host and `stored` there; `waits`, steps that
    waited for rows of the host."""

    rows: int = 0
    hits: int = 0
    loaded: int = 0
    stored: int = 0
    waits: int = 0

    def __add__(self, other: SwapCounts) -> SwapCounts:
        """The sums."""
        rows, hits, waits = self.rows + other.rows, self.hits + other.hits, self.waits + other.waits
        return SwapCounts(rows, hits, self.loaded + other.loaded, self.stored + other.stored, waits)
