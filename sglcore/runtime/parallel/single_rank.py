"""A group of one rank, with the operations of a `Group`. Nothing waits."""

from __future__ import annotations

from torch import Tensor

from sglcore.runtime.parallel.pending_collective import Finished, Handle


class Alone:
    """Has the operations of `Group` that layers use, for one rank: each returns the local value
    without communication and without a copy. It has no `barrier`, `part` and `close`.
    """

    rank, size = 0, 1

    def goes_into(self, graph: str) -> bool:
        """Return True: there is nothing to capture."""
        return True

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return `x` as [1, *shape of x]."""
        return x.unsqueeze(0)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Return `x`."""
        return x

    def launch_all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Handle:
        """Return `x` as a finished handle."""
        return Finished(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Return `x`."""
        return x

    def least(self, value: int) -> int:
        """Return `value`."""
        return value
