"""Packed weights: a tensor subclass that holds a linear layer's weight in the memory format of its
kernels. It has a shape and a dtype, and any torch operation on it raises TypeError."""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Held(Protocol):
    """The data of one packed weight, in the memory format of its kernels."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the packed weight takes, padding included."""
        ...

    @property
    def name(self) -> str:
        """Its name in the ledger, such as "bf16 panels" or "int4 panels of groups of 32"."""
        ...


class Form(Held, Protocol):
    """The data of one packed weight [out, in], in a format of the native kernels, with the
    operations that read it."""

    def multiply(self, x: Tensor, bias: Tensor | None, wide: bool = False) -> Tensor:
        """Return x [T, in] times the weight's transpose, plus bias [out] (None: none): [T, out] in
        x's dtype, or as float32 if `wide`."""
        ...

    def multiply_gated(self, x: Tensor) -> Tensor | None:
        """Return silu(x @ gate.T) * (x @ up.T) [T, out / 2] in x's dtype, for a weight with gate's
        rows before up's and with the reference's casts; None, and nothing is computed, if this
        format does not support it for a weight of this size."""
        ...

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight's rows `ids` int [T] as [T, in] of `dtype`, float32 or bfloat16."""
        ...


class ClosedWeight(Tensor):
    """A packed weight with the shape and dtype of the original, and its `form`. Any torch operation
    on it raises TypeError."""

    form: Held

    def __new__(cls, form: Held, shape: torch.Size, dtype: torch.dtype) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # pyright: ignore
        made.form = form
        return made

    @property
    def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Bytes of the packed form, not of the shape and dtype."""
        return self.form.num_bytes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(f"{func} on a packed weight; found a weight in a form of its kernels, wanted a plain one")

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.form.name})"


class PackedWeight(ClosedWeight):
    """A `ClosedWeight` for the native kernels: its form has the operations that read it."""

    form: Form  # pyright: ignore[reportIncompatibleVariableOverride]
