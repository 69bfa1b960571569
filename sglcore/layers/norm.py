"""Normalisation layers."""

from __future__ import annotations

from torch import Tensor

from sglcore.layers.scope import Scope


class RMSNorm:
    """Root mean square norm with a weight."""

    __slots__ = ("_add_norm", "_norm", "eps", "weight")

    def __init__(self, build: Scope, size: int, eps: float) -> None:
        self.weight = build.parameter("weight", size)
        self.eps = eps
        self._norm = build.kernels.rms_norm
        self._add_norm = build.kernels.add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension of [..., size]."""
        return self._norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of residual + x, and that sum, which begins with x if there is no residual; uses up both arguments."""
        if residual is None:
            return self(x), x
        return self._add_norm(x, residual, self.weight, self.eps)


class LayerNorm:
    """Layer norm with weight and bias."""

    __slots__ = ("_norm", "bias", "eps", "weight")

    def __init__(self, build: Scope, size: int, eps: float) -> None:
        self.weight = build.parameter("weight", size)
        self.bias = build.parameter("bias", size)
        self.eps = eps
        self._norm = build.kernels.layer_norm

    def __call__(self, x: Tensor) -> Tensor:
        """Over the last dimension of [T, size]."""
        return self._norm(x, self.weight, self.bias, self.eps)
