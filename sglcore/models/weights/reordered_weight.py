"""Weights with rows in another order in the checkpoint than in the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglcore.models.weights.quantized_weight import QuantizedWeight, Stored
from sglcore.models.weights.weight_sources import Source


@dataclass(frozen=True, slots=True)
class ReorderedSource:
    """A `Source` with reordered rows: row i of the weight is row `order`[i] (int64 [N]) of
    `source`."""

    source: Source
    order: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        return self.source.num_bytes

    @property
    def form(self) -> str | None:
        """The name of its quantisation; None for a plain weight."""
        return self.source.form

    def copy(self, target: Tensor, report: Callable[[int], None]) -> None:
        """Copy the reordered weight to `target`, through a copy on the host."""
        whole = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        self.source.copy(whole, report)
        target.copy_(whole[self.order])

    def stored(self, report: Callable[[int], None]) -> Stored:
        """Read the stored weight to the host and return it with reordered rows. Only if `form` is
        not None.
        """
        return ReorderedWeight(self.source.stored(report), self.order)


@dataclass(frozen=True, slots=True)
class ReorderedWeight:
    """A `Stored` weight with reordered rows: row i is row `order`[i] (int64 [N]) of `weight`."""

    weight: Stored
    order: Tensor

    @property
    def form(self) -> str:
        """The name of its format."""
        return self.weight.form

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K) of the unpacked weight."""
        return self.weight.shape

    def values(self, rows: slice) -> Tensor:
        """Return float32 [n, K]: the values of the weight in these rows. Computes all rows from the
        first to the last of them in the checkpoint's order, which for rows that move within their
        head are few more."""
        wanted = self.order[rows]
        if not len(wanted):
            return self.weight.values(slice(0, 0))
        first = int(wanted.min())
        return self.weight.values(slice(first, int(wanted.max()) + 1))[wanted - first]

    def as_codes(self) -> QuantizedWeight | None:
        """Return integer codes; None if that needs rounding."""
        codes = self.weight.as_codes()
        if codes is None:
            return None
        zeros = None if codes.zeros is None else codes.zeros[self.order]
        return replace(codes, codes=codes.codes[self.order], scales=codes.scales[self.order], zeros=zeros)
