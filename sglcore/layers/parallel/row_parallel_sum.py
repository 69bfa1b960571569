"""The all-reduce after a linear layer that is divided by its inputs (row parallel), and its bias.

`tensor_parallel_layers.py` divides the layers.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglcore.layers.build_scope import Scope
from sglcore.runtime.parallel.process_group import AnyGroup


class Summed:
    """Callable that runs a layer, `inner`, which computes a partial sum on each rank, and returns
    the sum over the ranks (all-reduce)."""

    __slots__ = ("_group", "_inner")

    def __init__(self, inner: Callable[..., Tensor], group: AnyGroup) -> None:
        """`inner` must return a new contiguous tensor that nothing else reads: the all-reduce
        overwrites it."""
        self._inner, self._group = inner, group

    def __call__(self, x: Tensor, *more: Tensor) -> Tensor:
        """Return the sum [T, out] on every rank, of [T, in] and further inputs of the layer."""
        return self._group.all_reduce(self._inner(x, *more))


def bias_once(build: Scope, bias: Tensor | None, group: AnyGroup) -> None:
    """Zero the bias of a summed layer on all ranks of `group` but rank 0, once it is loaded, so
    that the sum adds it once. None: there is no bias.

    Every rank declares and loads the bias, so that all ranks read the same tensors.
    """
    if bias is None or not group.rank:
        return
    own = bias

    def clear() -> None:
        own.zero_()

    build.weights.derived.append(clear)
