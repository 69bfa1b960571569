"""Linear layers of which each rank has a part, and the sum over ranks that ends a block of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglcore.layers.scope import Scope
from sglcore.runtime.parallel.group import AnyGroup


class Summed:
    """A layer whose output on each rank is a part of a sum: what it gives is the sum."""

    __slots__ = ("_group", "_inner")

    def __init__(self, inner: Callable[..., Tensor], group: AnyGroup) -> None:
        """`inner` gives a tensor of its own, which nobody else reads."""
        self._inner, self._group = inner, group

    def __call__(self, x: Tensor, *more: Tensor) -> Tensor:
        """[T, in], and what else the layer takes, to [T, out], on every rank."""
        return self._group.all_reduce(self._inner(x, *more))


def bias_once(build: Scope, bias: Tensor | None, group: AnyGroup) -> None:
    """The bias of a layer that ends in a sum counts on rank 0 alone; all ranks read it, so that a file is read alike."""
    if bias is None or not group.rank:
        return
    own = bias

    def clear() -> None:
        own.zero_()

    build.weights.derived.append(clear)
