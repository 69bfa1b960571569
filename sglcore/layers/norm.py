"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.layers.build_scope import Scope
from sglcore.runtime.kernels.table import KernelTable


class RMSNorm:
    """Root mean square norm with a weight."""

    __slots__ = ("_add_norm", "_norm", "eps", "weight")

    def __init__(
        self, build: Scope, size: int, eps: float, heads: int | None = None, offset: float | None = None
    ) -> None:
        """`heads`: the input is [T, heads, size], and each head is normed; `add` then takes no
        residual.

        The normed row is cast, then multiplied by the weight. With an `offset`, which loading adds
        to the weight, the weight and the product are float32, and the product is cast.
        """
        self.weight = build.parameter("weight", size, dtype=None if offset is None else torch.float32)
        if offset:
            build.weights.offsets.append((self.weight, offset))
        self.eps = eps
        x = build.rows(size) if heads is None else build.rows(heads, size)
        self._norm = build.kernel(KernelTable.rms_norm, x, self.weight, eps)
        self._add_norm = None if heads else build.kernel(KernelTable.add_rms_norm, x, x, self.weight, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of `x` [..., size] over its last dimension."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of residual + x, and that sum; `residual` None counts as 0. Neither
        argument may be read afterwards."""
        if residual is None:
            return self(x), x
        assert self._add_norm is not None
        return self._add_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """Layer norm with a weight and, if `bias`, a bias."""

    __slots__ = ("_norm", "bias", "eps", "weight")

    def __init__(self, build: Scope, size: int, eps: float, bias: bool = True) -> None:
        self.weight = build.parameter("weight", size)
        self.bias = build.parameter("bias", size) if bias else torch.zeros_like(self.weight)
        self.eps = eps
        self._norm = build.kernel(KernelTable.layer_norm, build.rows(size), self.weight, self.bias, eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of `x` [T, size] over its last dimension."""
        return self._norm(x, self.weight, self.bias, self.eps)
