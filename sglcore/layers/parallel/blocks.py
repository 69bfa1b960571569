"""What ends a block of which each rank computes a part of a sum, for the rows of one shard of requests or of all."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglcore.layers.parallel.linear import Summed
from sglcore.runtime.parallel.group import Groups
from sglcore.runtime.parallel.rows import Rows, moves_of_step

Block = Callable[..., Tensor]


class OfAllShards:
    """A block that runs on the rows of all shards at once, of which each rank computes a part of the inside."""

    __slots__ = ("_groups", "_inner")

    def __init__(self, inner: Block, groups: Groups) -> None:
        """`inner` gives a tensor of its own, which nobody else reads."""
        self._inner, self._groups = inner, groups

    def __call__(self, x: Tensor, *more: Tensor) -> Tensor:
        """[T, in] of this shard, and what else the block takes of each row, to [T, out], on each of its ranks."""
        moves = moves_of_step(self._groups)
        every = [moves.move(each, Rows.LOCAL, Rows.GLOBAL) for each in (x, *more)]
        return moves.move(self._inner(*every), Rows.GLOBAL, Rows.LOCAL, is_partial=True)


def ended(inner: Block, groups: Groups) -> Block:
    """`inner`, of which each of all ranks has a part, as a block from rows of the shard to rows of the shard."""
    return OfAllShards(inner, groups) if groups.place.topology.dp > 1 else Summed(inner, groups.tp)
