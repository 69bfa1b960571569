"""The reduction at the end of a tensor parallel block.

The block runs on the tokens of one data parallel rank, or on those of all.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglcore.layers.parallel.row_parallel_sum import Summed
from sglcore.runtime.parallel.rank_groups import Groups
from sglcore.runtime.parallel.row_distribution import Rows, moves_of_step

Block = Callable[..., Tensor]


class OfAllShards:
    """Callable that runs a block on the tokens of all data parallel ranks: gathers their rows, runs
    `inner`, which returns a partial sum on each rank, and returns the sum for this rank's rows."""

    __slots__ = ("_groups", "_inner")

    def __init__(self, inner: Block, groups: Groups) -> None:
        """`inner` must return a new tensor that nothing else reads: the reduction may overwrite
        it."""
        self._inner, self._groups = inner, groups

    def __call__(self, x: Tensor, *more: Tensor) -> Tensor:
        """Return [T, out] of this data parallel rank's tokens [T, in].

        `more` are further inputs for each token.
        """
        moves = moves_of_step(self._groups)
        every = [moves.move(each, Rows.LOCAL, Rows.GLOBAL) for each in (x, *more)]
        return moves.move(self._inner(*every), Rows.GLOBAL, Rows.LOCAL, is_partial=True)


def ended(inner: Block, groups: Groups) -> Block:
    """Return `inner` followed by its reduction: an all-reduce over `tp`, or `OfAllShards` with data
    parallel attention. `inner` computes a partial sum on each rank.

    Input and output have the tokens of this data parallel rank.
    """
    return OfAllShards(inner, groups) if groups.place.topology.dp > 1 else Summed(inner, groups.tp)
