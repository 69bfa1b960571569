"""The part of a checkpoint's tensor that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglcore.checkpoint.parallel.tensor_parallel import Range


@dataclass(frozen=True, slots=True)
class Cut:
    """The `ranges` of dimension `dim`, one after another; the dimension has `whole` entries in the
    checkpoint. A target's entries beyond the ranges are padding, and zero."""

    dim: int
    whole: int
    ranges: tuple[Range, ...]

    def shape(self, target: Tensor) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor, from that of this rank's part."""
        found = list(target.shape)
        found[self.dim] = self.whole
        return tuple(found)

    def copy(self, whole: Tensor, target: Tensor) -> None:
        """Fill `target`, this rank's part, from the checkpoint's tensor `whole`, cast to the
        target's dtype. Entries after the ranges become 0."""
        place = 0
        for first, last in self.ranges:
            target.narrow(self.dim, place, last - first).copy_(whole.narrow(self.dim, first, last - first))
            place += last - first
        target.narrow(self.dim, place, target.shape[self.dim] - place).zero_()
