"""When two halves that take turns are faster than the whole: a model of one layer, by numbers that were measured.

A layer computes for c seconds and waits for m; what of c does not shrink with the rows (weights are read twice) is its share e. The
whole takes c + m. Two halves take the longer of what they compute, (1 + e) c, and of what they wait for, each half by itself, where one
always computes while the other waits. How far the first is ahead decides what is left of that where pieces between waits are not
alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Affine:
    """Seconds of something done with `rows` rows: `fixed`, and `each` for every row."""

    fixed: float
    each: float

    def seconds(self, rows: float) -> float:
        """Of so many."""
        return self.fixed + self.each * rows

    @staticmethod
    def through(few: tuple[int, float], many: tuple[int, float]) -> Affine:
        """By (rows, seconds) of two measurements; neither number is below zero."""
        each = max((many[1] - few[1]) / (many[0] - few[0]), 0.0)
        return Affine(max(many[1] - each * many[0], 0.0), each)


def in_turns(pieces: Sequence[tuple[float, float]], stagger: int) -> float:
    """Seconds of two halves that each compute and then wait, piece after piece, and take turns where they wait, the first `stagger` waits
    ahead: one device, and one link, on which one message goes at a time."""
    device = link = 0.0
    arrived, places = [0.0, 0.0], [0, 0]
    half, ahead = 0, stagger
    while min(places) <= len(pieces):
        if places[half] <= len(pieces):
            device = max(device, arrived[half])
        if places[half] < len(pieces):
            computing, waiting = pieces[places[half]]
            device += computing
            arrived[half] = link = max(link, device) + waiting
        places[half] += 1
        is_ahead = half == 0 and ahead > 0
        ahead -= is_ahead
        half = half if is_ahead else 1 - half
    return device


STAGGERS = (0, 1, 2)
SETTLED = 4
"""Layers after which one takes as long as the next."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer's computing and its waiting for other ranks. `parts`: what shares of both lie in each piece that it computes before it
    waits."""

    compute: Affine
    waiting: Affine
    parts: tuple[tuple[float, float], ...] = ((0.5, 0.5), (0.5, 0.5))

    def pieces(self, rows: float, layers: int) -> list[tuple[float, float]]:
        """What so many layers compute before each wait, and how long that is."""
        computing, waiting = self.compute.seconds(rows), self.waiting.seconds(rows)
        return [(part * computing, waits * waiting) for part, waits in self.parts] * layers

    def stagger(self, rows: int, layers: int) -> int:
        """By how many pauses the first of two halves is best ahead; the fewest of those that are equally good."""
        pieces = self.pieces(rows / 2, layers)
        return min(STAGGERS, key=lambda stagger: (round(in_turns(pieces, stagger), 9), stagger))

    def whole(self, rows: int) -> float:
        """Seconds of a layer of so many rows."""
        return self.compute.seconds(rows) + self.waiting.seconds(rows)

    def halves(self, rows: int) -> float:
        """The same of two halves that are best staggered, in the midst of many layers. Where its pieces are alike, what is hidden is all
        but the longer of both."""
        few, many = self.pieces(rows / 2, SETTLED), self.pieces(rows / 2, 2 * SETTLED)
        return min(in_turns(many, stagger) - in_turns(few, stagger) for stagger in STAGGERS) / SETTLED

    def hideable(self, rows: int) -> float:
        """Seconds that halves hide at best: the shorter of what they compute and what they wait for."""
        return 2 * min(self.compute.seconds(rows / 2), self.waiting.seconds(rows / 2))

    def share(self, rows: int) -> float:
        """e: the part of the computing that is there for any number of rows."""
        return self.compute.fixed / self.compute.seconds(rows)

    def least_rows(self, most: int) -> int | None:
        """From how many rows on halves are faster, a power of two of at most `most` rows; None: from no such number."""
        found, rows = None, 1 << max(most.bit_length() - 1, 0)
        while rows >= 2 and self.halves(rows) < self.whole(rows):
            found, rows = rows, rows // 2
        return found
