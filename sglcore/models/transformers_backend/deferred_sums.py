"""Delays the residual sum until the norm after it, so that addition and norm are one kernel.

A layer's result is an `Addend`. Adding it to another tensor makes a `Sum`; the engine's norm adds
and norms it at once. Any other operation sees the values as if they had been added where the class
says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Addend(Tensor):
    """A layer's result [1, T, H] in memory of its own; `rows` is the same as [T, H]. The norm of a
    sum overwrites both operands."""

    rows: Tensor

    @classmethod
    def of(cls, x: Tensor, rows: Tensor) -> Addend:
        """Make an addend from a layer's result `x` [1, T, H]; `rows` is its memory as [T, H]."""
        made = x.as_subclass(cls)
        made.rows = rows
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Turn an addition into a `Sum`; run any other operation on the plain tensor."""
        if func is Tensor.add and len(args) == 2 and not kwargs:
            residual, addend = args if isinstance(args[1], cls) else (args[1], args[0])
            return Sum.of(residual, addend)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Sum(Tensor):
    """`residual` + `addend`, both [T, H]. Its memory and shape [1, T, H] are the addend's; `total`
    is the sum [T, H], once computed."""

    residual: Tensor
    addend: Tensor
    total: Tensor | None

    @classmethod
    def of(cls, residual: Tensor, addend: Addend) -> Sum:
        """Make the sum of a tensor [1, T, H] and an addend, both of one dtype, without computing
        it.
        """
        made = addend.as_subclass(cls)
        made.residual, made.addend, made.total = _rows(residual), addend.rows, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Delay a further addition; for any other operation, compute the sum first."""
        if func is Tensor.add and len(args) == 2 and not kwargs and type(args[1]) is Addend:
            return cls.of(args[0], args[1])
        args, kwargs = tree_map_only(Sum, added, (args, kwargs or {}))
        return func(*args, **kwargs)


def added(x: Tensor) -> Tensor:
    """Return a `Sum` as a computed tensor [1, T, H], any other tensor unchanged."""
    return _rows(x)[None] if type(x) is Sum else x


def _rows(x: Tensor) -> Tensor:
    """[1, T, H] to [T, H]; computes a `Sum` at the first call and keeps its `total`."""
    if type(x) is not Sum:
        return x.rows if type(x) is Addend else x[0]
    if x.total is None:
        x.total = x.residual + x.addend
    return x.total
