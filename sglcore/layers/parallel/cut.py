"""Which part of a checkpoint's tensor a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

Range = tuple[int, int]
"""[first, last)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Of dimension `dim`, which has `whole` entries in the checkpoint: the `ranges`, one after the
    other. What a target holds beyond them is padding, and zero."""

    dim: int
    whole: int
    ranges: tuple[Range, ...]

    def shape(self, target: Tensor) -> tuple[int, ...]:
        """That of the checkpoint's tensor."""
        found = list(target.shape)
        found[self.dim] = self.whole
        return tuple(found)

    def copy(self, whole: Tensor, target: Tensor) -> None:
        """Fill a target from the checkpoint's tensor, cast to its dtype."""
        place = 0
        for first, last in self.ranges:
            target.narrow(self.dim, place, last - first).copy_(whole.narrow(self.dim, first, last - first))
            place += last - first
        target.narrow(self.dim, place, target.shape[self.dim] - place).zero_()


def clipped(part: Range, whole: int) -> tuple[Range, ...]:
    """Return the part of a range that lies below `whole`: one range, or none."""
    first, last = min(part[0], whole), min(part[1], whole)
    return ((first, last),) if last > first else ()
