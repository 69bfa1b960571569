"""A group of one rank: the operations of a `Group`, and nobody to wait for."""

from __future__ import annotations

from torch import Tensor

from sglcore.runtime.parallel.handle import Finished, Handle


class Alone:
    """Every operation gives what this rank has."""

    rank, size = 0, 1

    def goes_into(self, graph: str) -> bool:
        """There is nothing to hold."""
        return True

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[1, *shape of x]."""
        return x.unsqueeze(0)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """`x` itself."""
        return x

    def all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """`x` itself."""
        return x

    def launch_all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Handle:
        """`x` itself."""
        return Finished(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`x` itself."""
        return x

    def least(self, value: int) -> int:
        """The number itself."""
        return value
