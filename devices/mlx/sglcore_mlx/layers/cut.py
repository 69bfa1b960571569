"""The part of a checkpoint's tensor that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import mlx.core as mx

from sglcore.checkpoint.parallel.tensor_parallel import Range
from sglcore.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """The `ranges` of dimension `dim`, one after another, of a tensor with `whole` entries there.
    Both count elements; in a packed weight, words and groups of elements are cut where they are.
    Entries of dimension 0 beyond the ranges are padding, and zero."""

    dim: int
    whole: int
    ranges: tuple[Range, ...]

    def shape(self, own: Sequence[int], stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that the checkpoint's tensor must have, from that of this rank's part.
        `stored`: its shape in the file. Raises ConfigError if a part would begin within a group of
        packed elements."""
        found, held = list(own), sum(last - first for first, last in self.ranges)
        found[self.dim] = self.whole
        if self.dim and len(stored) == len(own) and own[self.dim] == self._place(held, stored):
            found[self.dim] = stored[self.dim]
        return tuple(found)

    def of(self, array: mx.array, own: Sequence[int]) -> mx.array:
        """Return this rank's part, of shape `own`, of the checkpoint's tensor. Lazy."""
        parts: list[mx.array] = []
        for first, last in self.ranges:
            part = slice(self._place(first, array.shape), self._place(last, array.shape))
            parts.append(array[(slice(None),) * self.dim + (part,)])
        missing = own[self.dim] - sum(part.shape[self.dim] for part in parts)
        if missing:
            parts.append(mx.zeros((missing, *array.shape[1:]), array.dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=self.dim)

    def _place(self, element: int, stored: Sequence[int]) -> int:
        """Return the entry of an element: several may share a word, or a scale."""
        found = element * (Fraction(stored[self.dim], self.whole) if self.dim else Fraction(1))
        if found.denominator > 1:
            raise ConfigError(
                f"a rank's part of a weight begins at element {element} of {self.whole}, inside a group of packed "
                "elements",
                remedy="another --tp, or another quantisation",
            )
        return int(found)
