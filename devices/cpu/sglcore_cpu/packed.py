"""A linear layer's weight in a form of some kernels' own: a tensor to whom only moves it, closed to
any other operation."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Held(Protocol):
    """How a weight [out, in] lies in memory."""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        ...

    @property
    def name(self) -> str:
        """What the ledger calls it, such as "bf16 panels" or "int4 panels of groups of 32"."""
        ...


class Form(Held, Protocol):
    """One of the native kernels, and what reads it."""

    def multiply(self, x: Tensor, bias: Tensor | None, wide: bool = False) -> Tensor:
        """x [T, in] times the weight's transpose, plus bias [out]: [T, out] in x's dtype; `wide`:
        the same values as float32."""
        ...

    def multiply_gated(self, x: Tensor) -> Tensor | None:
        """silu(x @ gate) * (x @ up) [T, out / 2] where the weight is gate over up, with the
        reference's casts; None where this form can not."""
        ...

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows int [T] of the weight as [T, in]."""
        ...


class ClosedWeight(Tensor):
    """A weight that shows the shape and dtype it had, and holds its `form`. Any operation of torch
    on it raises TypeError."""

    form: Held

    def __new__(cls, form: Held, shape: torch.Size, dtype: torch.dtype) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # pyright: ignore
        made.form = form
        return made

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Memory that the form takes."""
        return self.form.num_bytes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} on a packed weight; found a weight in a form of its kernels, wanted a plain one")

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.form.name})"


class PackedWeight(ClosedWeight):
    """A weight of the native kernels."""

    form: Form  # pyright: ignore[reportIncompatibleVariableOverride]
