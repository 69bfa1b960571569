"""Weights that a checkpoint stores quantised, in any format: as integer codes, or as something else
that has values.

Everything here runs on the host. Values are computed for some rows, codes for the whole weight.
Only `rounded` rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

GROUPS = (128, 64, 32)
"""Group sizes of packed weights: columns that share a scale."""

PIECE = 1 << 21
"""Elements dequantised at a time."""


class Stored(Protocol):
    """A weight [N, K] as a checkpoint stores it."""

    @property
    def form(self) -> str:
        """The name of its format, such as "8-bit floats"."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K) of the unpacked weight."""
        ...

    def values(self, rows: slice) -> Tensor:
        """Return float32 [n, K]: the values of the weight in these n rows. Exact, except for the
        rounding of float32.
        """
        ...

    def as_codes(self) -> QuantizedWeight | None:
        """Return integer codes; None if that needs rounding."""
        ...


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Integer codes: w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]) with g = k // group.

    `codes` uint8 [N, K]; `scales` float32 [N, ceil(K / group)]; `zeros` as `scales`, None if all
    are 2 ** (bits - 1); `dtype` is the dtype in which the model computes.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K) of the unpacked weight."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def form(self) -> str:
        """The name of its format."""
        return f"{self.bits}-bit groups of {self.group}"

    def as_codes(self) -> QuantizedWeight | None:
        """Return itself."""
        return self

    def values(self, rows: slice) -> Tensor:
        """Return float32 [n, K]: the values of the weight in these rows."""
        zeros = 1 << (self.bits - 1) if self.zeros is None else self._spread(self.zeros[rows])
        return (self.codes[rows].float() - zeros) * self._spread(self.scales[rows])

    def _spread(self, by_group: Tensor) -> Tensor:
        return by_group.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]


@dataclass(frozen=True, slots=True)
class ScatteredWeight:
    """A `Stored` weight of integer codes with scattered groups (act-order): column k belongs to
    group `group_of[k]`, int64 [K]."""

    weight: QuantizedWeight
    group_of: Tensor
    form: str = "groups in another order than the columns (act-order)"

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K) of the unpacked weight."""
        return self.weight.shape

    def as_codes(self) -> QuantizedWeight | None:
        """Return None: groups of a packed weight are consecutive columns."""
        return None

    def values(self, rows: slice) -> Tensor:
        """Return float32 [n, K]: the values of the weight in these rows."""
        whole = self.weight
        zeros = 1 << (whole.bits - 1) if whole.zeros is None else whole.zeros[rows][:, self.group_of]
        return (whole.codes[rows].float() - zeros) * whole.scales[rows][:, self.group_of]


@dataclass(frozen=True, slots=True)
class ScaledFloats:
    """Narrow floats [N, K] times scales float32 [blocks of rows, blocks of columns], with `block` =
    (rows, columns) that share a scale."""

    floats: Tensor
    scales: Tensor
    block: tuple[int, int]
    form: str = "8-bit floats"

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs N, inputs K) of the unpacked weight."""
        return self.floats.shape[0], self.floats.shape[1]

    def as_codes(self) -> QuantizedWeight | None:
        """Return None: floats are no integers."""
        return None

    def values(self, rows: slice) -> Tensor:
        """Return float32 [n, K]: the values of the weight in these rows."""
        first, last, _ = rows.indices(self.floats.shape[0])
        scales = self.scales[torch.arange(first, last) // self.block[0]]
        return self.floats[rows].float() * scales.repeat_interleave(self.block[1], 1)[:, : self.floats.shape[1]]


def fill(stored: Stored, target: Tensor) -> None:
    """Write a weight's values into a tensor [N, K] on any device, cast to its dtype."""
    for rows in pieces(stored.shape):
        target[rows].copy_(stored.values(rows))


def pieces(shape: tuple[int, int]) -> Iterator[slice]:
    """Return slices that cover the rows of a weight, with about `PIECE` elements each, at least one
    row.
    """
    count = max(1, PIECE // max(shape[1], 1))
    return (slice(first, min(first + count, shape[0])) for first in range(0, shape[0], count))


def packable(weight: QuantizedWeight) -> QuantizedWeight | None:
    """Return the same values in 4 or 8 bits with a group size in `GROUPS`; None if that needs
    rounding."""
    group = next((size for size in GROUPS if weight.group % size == 0), None)
    if weight.group >= weight.shape[1]:
        group = next((size for size in GROUPS if weight.shape[1] % size == 0), GROUPS[-1])
    return None if group is None else _as(weight, 4 if weight.bits <= 4 else 8, group)


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate the rows of packable weights, with the bits of the widest and the group size of
    the smallest. Rounds nothing."""
    bits, group = max(part.bits for part in parts), min(part.group for part in parts)
    alike = [_as(part, bits, group) for part in parts]
    codes, scales = torch.cat([part.codes for part in alike]), torch.cat([part.scales for part in alike])
    if all(part.zeros is None for part in alike):
        return QuantizedWeight(codes, scales, None, bits, group)
    return QuantizedWeight(codes, scales, torch.cat([_zeros(part) for part in alike]), bits, group)


def rounded(stored: Stored, group: int = GROUPS[-1]) -> QuantizedWeight:
    """Round a weight to 8-bit codes with zeros of 128, in groups of `group` columns; K must be a
    multiple of `group`.
    """
    rows, columns = stored.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    scales = torch.empty(rows, columns // group)
    for piece in pieces(stored.shape):
        values = stored.values(piece).unflatten(1, (columns // group, group))
        scales[piece] = values.abs().amax(-1) / 127
        inverse = torch.where(scales[piece] > 0, 1 / scales[piece], 0).unsqueeze(-1)
        codes[piece] = (values * inverse).round_().add_(128).to(torch.uint8).flatten(1)
    return QuantizedWeight(codes, scales, None, 8, group)


def _as(weight: QuantizedWeight, bits: int, group: int) -> QuantizedWeight:
    columns = weight.shape[1]
    count = -(-columns // group)

    def finer(by_group: Tensor) -> Tensor:
        if by_group.shape[1] == 1:
            return by_group.expand(-1, count).contiguous()
        return by_group if weight.group == group else by_group.repeat_interleave(weight.group // group, 1)[:, :count]

    zeros = weight.zeros if weight.zeros is not None or bits == weight.bits else _zeros(weight)
    return QuantizedWeight(weight.codes, finer(weight.scales), None if zeros is None else finer(zeros), bits, group)


def _zeros(weight: QuantizedWeight) -> Tensor:
    if weight.zeros is not None:
        return weight.zeros
    return torch.full_like(weight.scales, 1 << (weight.bits - 1))
