"""The sum of a decoder's layers, put off until the norm behind it: addition and norm are then one kernel.

What a layer gives is an `Addend`. Adding it to another tensor makes a `Sum`, which a norm that knows of sums adds and norms at
once; any other operation sees the values as if they had been added where the class says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Addend(Tensor):
    """A layer's result, on its own memory. Both it and what it is added to are spoilt by the sum's norm."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Addition waits; all else is the plain tensor's."""
        if func is Tensor.add and len(args) == 2 and not kwargs:
            residual, addend = args if isinstance(args[1], cls) else (args[1], args[0])
            return Sum.of(added(residual), addend)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Sum(Tensor):
    """`residual` + `addend`. It has the memory of the residual; `total` is the sum once somebody has made it."""

    residual: Tensor
    addend: Tensor
    total: Tensor | None

    @classmethod
    def of(cls, residual: Tensor, addend: Tensor) -> Sum:
        """Of two tensors [1, T, H] of one dtype."""
        made = residual.as_subclass(cls)
        made.residual, made.addend, made.total = residual, addend, None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation on what was to be added; another addition waits again."""
        if func is Tensor.add and len(args) == 2 and not kwargs and type(args[1]) is Addend:
            return cls.of(added(args[0]), args[1])
        args, kwargs = tree_map_only(Sum, added, (args, kwargs or {}))
        return func(*args, **kwargs)


def added(x: Tensor) -> Tensor:
    """A tensor as it is; a sum, added now if it was not."""
    if type(x) is not Sum:
        return x
    if x.total is None:
        with torch._C.DisableTorchFunctionSubclass():
            x.total = x.residual + x.addend
    return x.total
