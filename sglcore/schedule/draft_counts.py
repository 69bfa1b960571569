"""What came of proposals, counted in one table of which every figure is a sum: lengths, rates at each place, and by what they depend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sglcore.schedule.request import Request

CACHED = ("0", "0.25", "0.5", "0.75", "1")
"""The most of a prompt that the prefix cache had, by the number that `DraftCell.cached` is."""


class DraftCell(NamedTuple):
    """Of a request in a step: the power of two below which its tokens are, as an exponent; how much of its prompt the prefix cache
    had (`CACHED`); how many proposals were verified, and how many of them were right."""

    context: int
    cached: int
    proposed: int
    accepted: int


DraftCounts = Mapping[tuple[int, int, int, int], int]
"""Steps of requests by `DraftCell`."""


def cells_of(
    requests: Sequence[Request], proposed: Iterable[int], emitted: Iterable[int]
) -> list[tuple[int, int, int, int]]:
    """The `DraftCell`s, as plain tuples, in which a step of these requests is counted that proposed and emitted so many of each."""
    return [
        (request.num_tokens.bit_length(), request.cached_share, made, count - 1)
        for request, made, count in zip(requests, proposed, emitted, strict=True)
    ]


class DraftSums(NamedTuple):
    """Of so many steps of requests: proposals, and those that were right. A step emits one token more."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def length(self) -> float | None:
        """Mean acceptance length: tokens that a step brought a request; None before the first."""
        return 1 + self.accepted / self.steps if self.steps else None


def sums_of(counts: DraftCounts) -> DraftSums:
    """Of all."""
    return sums_by(counts, lambda _: 0).get(0, DraftSums())


def sums_by(counts: DraftCounts, key: Callable[[DraftCell], int]) -> dict[int, DraftSums]:
    """Of those with the same key, ascending."""
    found: dict[int, DraftSums] = {}
    for place, count in counts.items():
        cell = DraftCell(*place)
        known = found.get(key(cell), DraftSums())
        added = (count, count * cell.proposed, count * cell.accepted)
        found[key(cell)] = DraftSums(*(old + new for old, new in zip(known, added, strict=True)))
    return dict(sorted(found.items()))


def at_places(counts: DraftCounts) -> list[tuple[int, int]]:
    """For the first, second, ... proposal of a step: steps that had one, and those in which it and all before it were right."""
    had, right = Counter[int](), Counter[int]()
    for (_, _, proposed, accepted), count in counts.items():
        had.update(dict.fromkeys(range(proposed), count))
        right.update(dict.fromkeys(range(accepted), count))
    return [(had[place], right[place]) for place in range(len(had))]
