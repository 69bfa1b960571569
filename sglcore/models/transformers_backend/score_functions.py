"""The attention scores of a class of transformers that computes attention itself, without contents.

A product of queries and keys gives `Scores`: shapes on the meta device that pass through whatever
the class does to them. At the product with the values, `attend` computes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sglcore.models.transformers_backend.shape_walk import Seen

_PRODUCTS = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm}
)
_ADDED = frozenset({torch.baddbmm, Tensor.baddbmm})
"""Products that add their first argument."""
_TIMES = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.mul_})
_OVER = frozenset({torch.div, Tensor.div, Tensor.__truediv__, Tensor.__itruediv__, Tensor.div_})

Attend = Callable[["Product", Tensor], Tensor]
"""(product, values [1, kv_heads, T, dim]) to [1, T, heads, dim]."""


@dataclass(slots=True)
class Product:
    """The product of queries [1, heads, T, dim] and keys [1, kv_heads, T, dim], and the operations
    on it: `scaling`, the factor of the scores so far; `masks` made by transformers; and `memory`,
    for every other tensor that was combined with the scores, by the identity of its storage
    (`memory` below), the factor at that time."""

    query: Tensor
    key: Tensor
    scaling: float
    masks: list[Seen] = field(default_factory=list)
    memory: dict[int, float] = field(default_factory=dict)


class Scores(Tensor):
    """Scores without contents, on the meta device."""

    product: Product

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes and record it in the product. Results are scores too."""
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
    """Torch function mode for one call of a module that computes attention itself. Inside, product
    `number`, counted from 1, is that of queries and keys and gives `Scores`, and `attend` computes
    the next product with these scores. `number` None: the first product with a square result."""

    def __init__(self, attend: Attend, number: int | None) -> None:
        super().__init__()
        self._attend, self._number = attend, number
        self.count = 0
        """The number of products so far."""

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
        """The number of the product of queries and keys; None if there was none."""
        return self._number


class Traced(TorchFunctionMode):
    """Torch function mode for one call of a module that computes attention itself, under a
    compiler. `numbers`, counted from 1, are those of the product of queries and keys and of the
    product with the values, in place of which `attend` computes the result. Scores are computed
    too, and the compiler removes them because nothing reads them."""

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
    """Torch function mode. Inside, product `number`, counted from 1, is computed as usual and kept
    in `result`."""

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
    """Return the two operands of a product of tensors with three or four dimensions; None for any
    other operation."""
    if func not in _PRODUCTS:
        return None
    batches = (kwargs[name] for name in ("batch1", "batch2") if name in kwargs)
    first, second = (*args[1:3], *batches) if func in _ADDED else args[:2]
    return (first, second) if first.dim() in (3, 4) and second.dim() == first.dim() else None


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the function's result. An index that is a list with one element becomes a slice: a
    list would be copied to the device."""
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
    """Return the identity of a tensor's storage."""
    return tensor.untyped_storage()._cdata
