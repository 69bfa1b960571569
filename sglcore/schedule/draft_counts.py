"""Counts of proposed and accepted draft tokens in one table. Each reported figure is a sum over it:
acceptance lengths, acceptance rates by position, and what they depend on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from sglcore.schedule.request import Request

CACHED = ("0", "0.25", "0.5", "0.75", "1")
"""Upper bound of the share of a prompt that the prefix cache had, indexed by `DraftCell.cached`."""


class DraftCell(NamedTuple):
    """Key of the table, for one request in one step.

    `context`: bit length of the request's token count. `cached`: share of its prompt that the
    prefix cache had, an index into `CACHED`. `proposed`: draft tokens that were verified.
    `accepted`: draft tokens that were accepted.
    """

    context: int
    cached: int
    proposed: int
    accepted: int


DraftCounts = Mapping[tuple[int, int, int, int], int]
"""Number of request steps by `DraftCell`. A request step is one request in one step."""


def cells_of(
    requests: Sequence[Request], proposed: Iterable[int], emitted: Iterable[int]
) -> list[tuple[int, int, int, int]]:
    """Return the `DraftCell` of each request in a step, as plain tuples, from the numbers of draft
    tokens and of emitted tokens of each request.
    """
    return [
        (request.num_tokens.bit_length(), request.cached_share, made, count - 1)
        for request, made, count in zip(requests, proposed, emitted, strict=True)
    ]


class DraftSums(NamedTuple):
    """Sums over `steps` request steps: proposed and accepted draft tokens. Each request step also
    emits one token that is no draft token.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def length(self) -> float | None:
        """Mean acceptance length: tokens per request step; None before the first."""
        return 1 + self.accepted / self.steps if self.steps else None


def sums_of(counts: DraftCounts) -> DraftSums:
    """Return the sums over all counts."""
    return sums_by(counts, lambda _: 0).get(0, DraftSums())


def sums_by(counts: DraftCounts, key: Callable[[DraftCell], int]) -> dict[int, DraftSums]:
    """Return the sums for each value of `key`, in ascending order of the key."""
    found: dict[int, DraftSums] = {}
    for place, count in counts.items():
        cell = DraftCell(*place)
        known = found.get(key(cell), DraftSums())
        added = (count, count * cell.proposed, count * cell.accepted)
        found[key(cell)] = DraftSums(*(old + new for old, new in zip(known, added, strict=True)))
    return dict(sorted(found.items()))


def at_places(counts: DraftCounts) -> list[tuple[int, int]]:
    """Return (steps, accepted) for each draft position from 0: the request steps that proposed a
    token there, and those that accepted it and all draft tokens before it.
    """
    had, right = Counter[int](), Counter[int]()
    for (_, _, proposed, accepted), count in counts.items():
        had.update(dict.fromkeys(range(proposed), count))
        right.update(dict.fromkeys(range(accepted), count))
    return [(had[place], right[place]) for place in range(len(had))]
