"""The sum of a decoder's layers, put off until the norm behind it: addition and norm are then one
kernel.

What a layer gives is an `Addend`. Adding it to another tensor makes a `Sum`, which a norm that
knows of sums adds and norms at once; any other operation sees the values as if they had been added
where the class says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Addend(Tensor):
    """A layer's result [1, T, H], on its own memory; `rows` is the same as [T, H]. Both it and what
    it is added to are spoilt by the sum's norm."""

    rows: Tensor

    @classmethod
    def of(cls, x: Tensor, rows: Tensor) -> Addend:
        """Of both forms of one result."""
        made = x.as_subclass(cls)
        made.rows = rows
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Addition waits; all else is the plain tensor's."""
        if func is Tensor.add and len(args) == 2 and not kwargs:
            residual, addend = args if isinstance(args[1], cls) else (args[1], args[0])
            return Sum.of(residual, addend)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Sum(Tensor):
    """`residual` + `addend`, both [T, H]. It has the memory and the shape [1, T, H] of the addend;
    `total` is the sum [T, H] once somebody has made it."""

    residual: Tensor
    addend: Tensor
    total: Tensor | None

    @classmethod
    def of(cls, residual: Tensor, addend: Addend) -> Sum:
        """Of a tensor [1, T, H] and what is added to it, of one dtype."""
        made = addend.as_subclass(cls)
        made.residual, made.addend, made.total = _rows(residual), addend.rows, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation on what was to be added; another addition waits again."""
        if func is Tensor.add and len(args) == 2 and not kwargs and type(args[1]) is Addend:
            return cls.of(args[0], args[1])
        args, kwargs = tree_map_only(Sum, added, (args, kwargs or {}))
        return func(*args, **kwargs)


def added(x: Tensor) -> Tensor:
    """A tensor as it is; a sum, added now if it was not."""
    return _rows(x)[None] if type(x) is Sum else x


def _rows(x: Tensor) -> Tensor:
    """[1, T, H] to [T, H]; the same of a sum."""
    if type(x) is not Sum:
        return x.rows if type(x) is Addend else x[0]
    if x.total is None:
        x.total = x.residual + x.addend
    return x.total
