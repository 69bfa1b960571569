"""When two halves that take turns are faster than the whole: a model of one layer, by numbers that were measured.

A layer computes for c seconds and waits for m; what of c does not shrink with the rows (weights are read twice) is its share e. The
whole takes c + m. Two halves take the longer of what they compute, (1 + e) c, and of what they wait for, each half by itself.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A layer's computing and its waiting for other ranks."""

    compute: Affine
    waiting: Affine

    def whole(self, rows: int) -> float:
        """Seconds of a layer of so many rows."""
        return self.compute.seconds(rows) + self.waiting.seconds(rows)

    def halves(self, rows: int) -> float:
        """The same of two halves: what is hidden is all but the longer of both."""
        return 2 * max(self.compute.seconds(rows / 2), self.waiting.seconds(rows / 2))

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
