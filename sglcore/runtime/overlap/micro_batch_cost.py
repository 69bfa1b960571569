"""Predicts when two interleaved micro-batches are faster than the whole batch.

Based on measured costs of a layer, which computes for c seconds and waits for m seconds. A share e
of c does not shrink with the rows, because weights are read twice. The whole batch takes c + m. If
one micro-batch always computes while the other waits, two take the larger of (1 + e) c and the sum
of their waits. If the pieces between waits differ, the number of waits by which the first
micro-batch is ahead decides how much of that is reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Affine:
    """Seconds as a function of rows: `fixed` plus `each` per row."""

    fixed: float
    each: float

    def seconds(self, rows: float) -> float:
        """Return the seconds for `rows` rows."""
        return self.fixed + self.each * rows

    @staticmethod
    def through(few: tuple[int, float], many: tuple[int, float]) -> Affine:
        """Fit two measurements (rows, seconds); neither coefficient is negative."""
        each = max((many[1] - few[1]) / (many[0] - few[0]), 0.0)
        return Affine(max(many[1] - each * many[0], 0.0), each)


def in_turns(pieces: Sequence[tuple[float, float]], stagger: int) -> float:
    """Simulate two micro-batches that compute and wait piece by piece; return the seconds.

    They alternate at waits, with the first `stagger` waits ahead. There is one device, and one link
    that carries one message at a time.
    """
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
"""Layers after which each further layer takes the same time."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer's compute time and its wait time for other ranks, by rows; `layer_cost` measures it.

    `parts`: for each piece, which computes and then waits, its shares of the two times.
    """

    compute: Affine
    waiting: Affine
    parts: tuple[tuple[float, float], ...] = ((0.5, 0.5), (0.5, 0.5))

    def pieces(self, rows: float, layers: int) -> list[tuple[float, float]]:
        """Return (compute seconds, wait seconds) of each piece of `layers` layers."""
        computing, waiting = self.compute.seconds(rows), self.waiting.seconds(rows)
        return [(part * computing, waits * waiting) for part, waits in self.parts] * layers

    def stagger(self, rows: int, layers: int) -> int:
        """Return the best number of waits by which the first micro-batch is ahead.

        The smallest if several are equal.
        """
        pieces = self.pieces(rows / 2, layers)
        return min(STAGGERS, key=lambda stagger: (round(in_turns(pieces, stagger), 9), stagger))

    def whole(self, rows: int) -> float:
        """Return the seconds of a layer with `rows` rows as one batch: computing plus waiting."""
        return self.compute.seconds(rows) + self.waiting.seconds(rows)

    def halves(self, rows: int) -> float:
        """Return the steady-state seconds per layer of two micro-batches with the best stagger.

        If the pieces of a layer are equal, everything but the larger of compute and wait is hidden.
        """
        few, many = self.pieces(rows / 2, SETTLED), self.pieces(rows / 2, 2 * SETTLED)
        return min(in_turns(many, stagger) - in_turns(few, stagger) for stagger in STAGGERS) / SETTLED

    def hideable(self, rows: int) -> float:
        """Return the seconds that micro-batches of a batch of `rows` rows hide at best: twice the
        smaller of a micro-batch's compute and wait time.
        """
        return 2 * min(self.compute.seconds(rows / 2), self.waiting.seconds(rows / 2))

    def share(self, rows: int) -> float:
        """Return e: the share of compute time that does not depend on the rows."""
        return self.compute.fixed / self.compute.seconds(rows)

    def least_rows(self, most: int) -> int | None:
        """Return the least power of two, up to `most`, from which on micro-batches are faster.

        None if none is.
        """
        found, rows = None, 1 << max(most.bit_length() - 1, 0)
        while rows >= 2 and self.halves(rows) < self.whole(rows):
            found, rows = rows, rows // 2
        return found
