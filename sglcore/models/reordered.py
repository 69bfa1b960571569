"""A weight with its rows in another order in the checkpoint than in the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglcore.models.quantized import QuantizedWeight, Stored
from sglcore.models.sources import Source


@dataclass(frozen=True, slots=True)
class ReorderedSource:
    """Row i of the weight is row `order`[i], int64 [N], of the source."""

    source: Source
    order: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in the files."""
        return self.source.num_bytes

    @property
    def form(self) -> str | None:
        """How a person calls its quantisation."""
        return self.source.form

    def copy(self, target: Tensor, report: Callable[[int], None]) -> None:
        """By a copy on the host."""
        whole = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        self.source.copy(whole, report)
        target.copy_(whole[self.order])

    def stored(self, report: Callable[[int], None]) -> Stored:
        """What is stored, its rows in the new order."""
        return ReorderedWeight(self.source.stored(report), self.order)


@dataclass(frozen=True, slots=True)
class ReorderedWeight:
    """A stored weight with its rows in another order."""

    weight: Stored
    order: Tensor

    @property
    def form(self) -> str:
        """Its own."""
        return self.weight.form

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.weight.shape

    def values(self, rows: slice) -> Tensor:
        """float32 values of some rows. Works all of them out."""
        return self.weight.values(slice(0, self.shape[0]))[self.order[rows]]

    def as_codes(self) -> QuantizedWeight | None:
        """The same as integer codes; None if that would need rounding."""
        codes = self.weight.as_codes()
        if codes is None:
            return None
        zeros = None if codes.zeros is None else codes.zeros[self.order]
        return replace(codes, codes=codes.codes[self.order], scales=codes.scales[self.order], zeros=zeros)
