"""The part of a quantised weight that a rank holds. Scales belong to rows and columns of the whole
weight and are cut with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglcore.layers.rank_part import Cut
from sglcore.models.weights.quantized_weight import QuantizedWeight, Stored


@dataclass(frozen=True, slots=True)
class CutWeight:
    """A `Stored` weight: ranges of the rows or of the columns of another one, `whole`.

    `shape` is the part's shape. Elements of the part after the ranges are zero.
    """

    whole: Stored
    cut: Cut
    shape: tuple[int, int]

    @property
    def form(self) -> str:
        """The name of the whole weight's format; also says if codes are not kept because a rank's
        part begins or ends within a group."""
        codes = self.whole.as_codes() if self.cut.dim else None
        crosses = codes is not None and not self._is_aligned(codes)
        return f"{self.whole.form}, some divided between two ranks" if crosses else self.whole.form

    def values(self, rows: slice) -> Tensor:
        """Return float32 [n, K]: the values of the part in these rows."""
        first, last, _ = rows.indices(self.shape[0])
        found = torch.zeros(last - first, self.shape[1])
        if self.cut.dim:
            self.cut.copy(self.whole.values(slice(first, last)), found)
            return found
        place = 0
        for start, end in self.cut.ranges:
            here = max(first, place), min(last, place + end - start)
            if here[0] < here[1]:
                there = slice(start + here[0] - place, start + here[1] - place)
                found[here[0] - first : here[1] - first] = self.whole.values(there)
            place += end - start
        return found

    def as_codes(self) -> QuantizedWeight | None:
        """Return the part as integer codes; None if that needs rounding, or if a group of columns
        is split between two ranks."""
        codes = self.whole.as_codes()
        if codes is None or (self.cut.dim and not self._is_aligned(codes)):
            return None
        zeros = None if codes.zeros is None else self._by_group(codes.zeros, codes.group)
        own, scales = self._part(codes.codes, self.cut), self._by_group(codes.scales, codes.group)
        return replace(codes, codes=own, scales=scales, zeros=zeros)

    def _is_aligned(self, codes: QuantizedWeight) -> bool:
        is_one = codes.scales.shape[1] == 1
        return is_one or all(place % codes.group == 0 for part in self.cut.ranges for place in part)

    def _by_group(self, by_group: Tensor, group: int) -> Tensor:
        """Cut scales or zeros [N, groups] to the part."""
        if not self.cut.dim:
            return self._part(by_group, self.cut)
        if by_group.shape[1] == 1:
            return by_group
        ranges = tuple((first // group, last // group) for first, last in self.cut.ranges)
        return self._part(by_group, replace(self.cut, ranges=ranges))

    def _part(self, whole: Tensor, cut: Cut) -> Tensor:
        kept = sum(last - first for first, last in cut.ranges)
        shape = list(whole.shape)
        shape[cut.dim] = kept if cut.dim else self.shape[0]
        found = torch.empty(shape, dtype=whole.dtype)
        cut.copy(whole, found)
        return found
