"""The scores of attention that a class of transformers computes itself, without contents.

A product of queries and keys gives `Scores`, which are shapes alone and go through whatever the
class does to them. Where they meet the values, `attend` answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sglcore.models.transformers_walk import Seen

_PRODUCTS = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm}
)
_ADDED = frozenset({torch.baddbmm, Tensor.baddbmm})
"""Products to which the first argument is added."""
_TIMES = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.mul_})
_OVER = frozenset({torch.div, Tensor.div, Tensor.__truediv__, Tensor.__itruediv__, Tensor.div_})

Attend = Callable[["Product", Tensor], Tensor]
"""Of such a product and values [1, kv_heads, T, dim], [1, T, heads, dim]."""


@dataclass(slots=True)
class Product:
    """Of queries [1, heads, T, dim] and keys [1, kv_heads, T, dim], and what befell it: scales,
    masks of transformers' making, and other tensors, by their memory, with the scale that there
    was."""

    query: Tensor
    key: Tensor
    scaling: float
    masks: list[Seen] = field(default_factory=list)
    memory: dict[int, float] = field(default_factory=dict)


class Scores(Tensor):
    """Scores without contents, on shapes alone."""

    product: Product

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The same of shapes alone; what comes of scores is scores."""
        leaves = tree_leaves((args, kwargs))
        product = next(each for each in leaves if isinstance(each, Scores)).product
        if func in _TIMES | _OVER and isinstance(args[1], float | int):
            product.scaling *= args[1] if func in _TIMES else 1 / args[1]
        for each in leaves:
            if isinstance(each, Seen):
                product.masks.append(each)
            elif isinstance(each, Tensor) and not isinstance(each, Scores):
                product.memory[memory(each)] = product.scaling
        with torch._C.DisableTorchFunction():
            made = func(*tree_map_only(Tensor, _shape, args), **tree_map_only(Tensor, _shape, kwargs or {}))
        return tree_map_only(Tensor, lambda each: _scores(each, product), made)


def _shape(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor) if tensor.is_meta else torch.empty_like(tensor, device="meta")


def _scores(shape: Tensor, product: Product) -> Scores:
    made = shape.as_subclass(Scores)
    made.product = product
    return made


class Between(TorchFunctionMode):
    """Inside, the product of this number is that of queries and keys, and the next one of what
    became of it is the attention. `number` None: any that has the look of it."""

    def __init__(self, attend: Attend, number: int | None) -> None:
        super().__init__()
        self._attend, self._number = attend, number
        self.count = 0
        """Products so far."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = operands_of(func, args, kwargs)
        if operands is None:
            return _called(func, args, kwargs)
        self.count += 1
        first, second = operands
        if isinstance(first, Scores):
            shape = torch.matmul(_shape(first), _shape(second)).shape
            return self._attend(first.product, _heads(second)).transpose(1, 2).reshape(shape)
        if self._number != self.count if self._number is not None else not _is_square(first, second):
            return func(*args, **kwargs)
        self._number = self.count
        scaling = float(kwargs.get("alpha", 1)) if func in _ADDED else 1.0
        product = _product(first, second, scaling)
        if func in _ADDED:
            product.memory[memory(args[0])] = scaling
        return _scores(torch.matmul(_shape(first), _shape(second)), product)

    @property
    def number(self) -> int | None:
        """Of the product of queries and keys."""
        return self._number


class Traced(TorchFunctionMode):
    """The same where a compiler traces: scores are computed, and nobody reads them, which the
    compiler sees. `numbers` are those of the two products."""

    def __init__(self, attend: Attend, numbers: tuple[int, int]) -> None:
        super().__init__()
        self._attend, self._first, self._last = attend, *numbers
        self._count = 0
        self._product: Product | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = operands_of(func, args, kwargs)
        found = _called(func, args, kwargs)
        if operands is None:
            return found
        self._count += 1
        if self._count == self._first:
            self._product = _product(*operands)
        if self._count == self._last and self._product is not None:
            return self._attend(self._product, _heads(operands[1])).transpose(1, 2).reshape(found.shape)
        return found


class Last(TorchFunctionMode):
    """Keeps the result of the product of a number, which the class computes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self._count = number, 0
        self.result = torch.empty(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, is_product = func(*args, **kwargs), operands_of(func, args, kwargs) is not None
        self._count += is_product
        if is_product and self._count == self._number:
            self.result = result
        return result


def _product(first: Tensor, second: Tensor, scaling: float = 1.0) -> Product:
    return Product(_heads(first), _heads(second.transpose(-1, -2)), scaling)


def operands_of(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor] | None:
    """The two that are multiplied, if both have heads or a batch."""
    if func not in _PRODUCTS:
        return None
    batches = (kwargs[name] for name in ("batch1", "batch2") if name in kwargs)
    first, second = (*args[1:3], *batches) if func in _ADDED else args[:2]
    return (first, second) if first.dim() in (3, 4) and second.dim() == first.dim() else None


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    """The function's result. An index that is a list of one, which would be copied to the device,
    is a slice instead."""
    if func is Tensor.__getitem__ and isinstance(args[1], tuple):
        lists = [each for each in args[1] if isinstance(each, list)]
        if lists and all(isinstance(each, slice) or each is Ellipsis or _is_one(each) for each in args[1]):
            return func(args[0], tuple(_sliced(each) if _is_one(each) else each for each in args[1]))
    return func(*args, **kwargs)


def _is_one(index: Any) -> bool:
    return isinstance(index, list) and len(index) == 1 and isinstance(index[0], int)


def _sliced(index: list[int]) -> slice:
    return slice(index[0], index[0] + 1 or None)


def _is_square(first: Tensor, second: Tensor) -> bool:
    return first.shape[-2] == second.shape[-1]


def _heads(part: Tensor) -> Tensor:
    return part if part.dim() == 4 else part[None]


def memory(tensor: Tensor) -> int:
    """Which memory a tensor is in."""
    return tensor.untyped_storage()._cdata
