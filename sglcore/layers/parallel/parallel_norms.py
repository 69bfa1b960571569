"""Norms of rows that are split over ranks: the mean square is taken over all parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglcore.layers.norm import RMSNorm
from sglcore.runtime.parallel.process_group import AnyGroup


class SharedNorm(RMSNorm):
    """Root mean square norm of a row that is split over all ranks of a group. All ranks of the
    group must call the norm.

    Each rank has the same number of elements. If elements are replicated, each element is on the
    same number of ranks. `add` takes no residual.
    """

    __slots__ = ("_group",)

    def __init__(self, own: RMSNorm, group: AnyGroup) -> None:
        """`own` has this rank's part of the weight."""
        self.weight, self.eps, self._group = own.weight, own.eps, group
        self._norm = self._add_norm = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return this rank's part of the normed rows, from its part `x` [T, size]."""
        wide = x.float()
        squares = self._group.all_reduce(wide.square().mean(-1, keepdim=True)) / self._group.size
        normed = wide * torch.rsqrt(squares + self.eps)
        return (self.weight * normed.to(self.weight.dtype)).to(x.dtype)


class SharedGroupNorm:
    """Callable in place of the kernel table's `gated_rms_norm`, with the gate first, for rows of
    `groups` groups that are each split over several ranks."""

    __slots__ = ("_group", "_groups")

    def __init__(self, groups: int, group: AnyGroup) -> None:
        """`groups`: groups of a row, a divisor of the size of the process group `group`. Each
        rank's part of a row belongs to one of them.
        """
        self._groups, self._group = groups, group

    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
        """Map this rank's part `x` [T, size] and its `gate`, with the weight [1, size], to the
        normed part [T, size]. The gate always comes first; `gate_first` is not read."""
        wide = x.float() * F.silu(gate.float())
        each = self._group.size // self._groups
        squares = wide.new_zeros(len(x), self._groups)
        squares[:, self._group.rank // each] = wide.square().mean(-1)
        own = self._group.all_reduce(squares)[:, self._group.rank // each, None] / each
        return (weight * (wide * torch.rsqrt(own + eps)).to(x.dtype)).to(x.dtype)
