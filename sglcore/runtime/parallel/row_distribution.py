"""How token rows are distributed over ranks, and how they move between the ranks of one step.

A state is a distribution, and whether values are complete or partial sums over a group. `move`
looks up the one or two collectives that lead from one state to another. In a group of one rank they
do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType

from torch import Tensor

from sglcore.runtime.forward_context import get_forward_context
from sglcore.runtime.parallel.rank_groups import Groups
from sglcore.worker.step_plan import StepPlan


class Rows(Enum):
    """How token rows are distributed over ranks.

    `LOCAL`: each rank has all rows of its data-parallel shard. `SCATTERED`: each rank has an equal
    part of these; the last parts are padded with zeros. `GLOBAL`: each rank has the rows of all
    shards.
    """

    LOCAL = "local"
    SCATTERED = "scattered"
    GLOBAL = "global"


class RowMoves:
    """Moves the token rows of one step between distributions, on one rank.

    `plan` has each shard's number of rows, `shard` is this rank's. A move may overwrite its input.
    A partial value is a summand: of a sum over the ranks of the shard for `LOCAL` rows, of a sum
    over all ranks for `GLOBAL` rows. Results are complete.
    """

    __slots__ = ("_groups", "_plan", "_shard")

    def __init__(self, plan: StepPlan, groups: Groups, shard: int) -> None:
        self._plan, self._groups, self._shard = plan, groups, shard

    @property
    def count(self) -> int:
        """Rows of this rank's shard."""
        return self._plan.global_num_tokens[self._shard]

    def move(self, x: Tensor, source: Rows, target: Rows, *, is_partial: bool = False) -> Tensor:
        """Move rows [N, ...] from one distribution to another.

        Raises KeyError for a move that does not exist.
        """
        return MOVES[source, target, is_partial](self, x)

    def own_part(self, x: Tensor) -> Tensor:
        """Return this rank's part of `LOCAL` rows, a view, without the padding of `SCATTERED`: the
        last ranks may have fewer rows, or none.
        """
        each = self._part_size()
        return x[self._groups.attn_tp.rank * each : (self._groups.attn_tp.rank + 1) * each]

    def _is_padded(self) -> bool:
        return self._plan.is_padded

    def _own_size(self) -> int:
        """Return the number of rows that this shard contributes to an exchange, padding included:
        its own, or those of the largest shard if the plan is padded, rounded up to a multiple of
        the shard's ranks.
        """
        return self._plan.sizes(self._groups.attn_tp.size)[self._shard]

    def _part_size(self) -> int:
        return self._own_size() // self._groups.attn_tp.size

    def _sum(self, x: Tensor) -> Tensor:
        return self._groups.attn_tp.all_reduce(x)

    def _scatter(self, x: Tensor) -> Tensor:
        return self._groups.attn_tp.reduce_scatter(_grown(x, self._own_size()))

    def _take_part(self, x: Tensor) -> Tensor:
        return _grown(self.own_part(x), self._part_size())

    def _gather(self, x: Tensor) -> Tensor:
        whole = _grown(x, self._part_size()).contiguous()
        return self._groups.attn_tp.all_gather(whole).flatten(0, 1)[: self.count]

    def _spread(self, x: Tensor) -> Tensor:
        return self._spread_parts(self._take_part(x)) if self._is_padded() else self._spread_by_sum(x, is_partial=False)

    def _spread_partial(self, x: Tensor) -> Tensor:
        return self._spread_parts(self._scatter(x)) if self._is_padded() else self._spread_by_sum(x, is_partial=True)

    def _spread_parts(self, x: Tensor) -> Tensor:
        """Gather every rank's equal part and drop the padding."""
        every = self._groups.tp.all_gather(x.contiguous())
        by_shard = every.view(len(self._plan.global_num_tokens), self._own_size(), *x.shape[1:])
        return _joined(by_shard, self._plan.global_num_tokens)

    def _spread_by_sum(self, x: Tensor, is_partial: bool) -> Tensor:
        """Write this shard's rows into zeros and sum over all ranks.

        If every rank of the shard has complete rows, only one of them writes.
        """
        starts, shard = self._plan.starts(), self._shard
        every = x.new_zeros(starts[-1], *x.shape[1:])
        if is_partial or self._groups.attn_tp.rank == 0:
            every[starts[shard] : starts[shard + 1]] = x
        return self._groups.tp.all_reduce(every)

    def _collect(self, x: Tensor) -> Tensor:
        starts, shard = self._plan.starts(), self._shard
        if not self._is_padded():
            return self._groups.tp.all_reduce(x)[starts[shard] : starts[shard + 1]]
        size, counts = self._own_size(), self._plan.global_num_tokens
        padded = x.new_zeros(len(counts) * size, *x.shape[1:])
        for place, count in enumerate(counts):
            padded[place * size : place * size + count] = x[starts[place] : starts[place + 1]]
        return self._gather(self._groups.tp.reduce_scatter(padded))


def _same(moves: RowMoves, x: Tensor) -> Tensor:
    return x


def _grown(x: Tensor, rows: int) -> Tensor:
    """Return `x` padded with zero rows at the end to `rows` rows: a new tensor, or `x` itself if it
    has `rows` rows.
    """
    if len(x) == rows:
        return x
    grown = x.new_zeros(rows, *x.shape[1:])
    grown[: len(x)] = x
    return grown


def _joined(by_shard: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Concatenate the first `counts` rows of each shard in [shards, N, ...]."""
    if all(count == by_shard.shape[1] for count in counts):
        return by_shard.flatten(0, 1)
    every = by_shard.new_empty(sum(counts), *by_shard.shape[2:])
    place = 0
    for rows, count in zip(by_shard, counts, strict=True):
        every[place : place + count] = rows[:count]
        place += count
    return every


MOVES: Mapping[tuple[Rows, Rows, bool], Callable[[RowMoves, Tensor], Tensor]] = MappingProxyType(
    {
        (Rows.LOCAL, Rows.LOCAL, False): _same,
        (Rows.LOCAL, Rows.LOCAL, True): RowMoves._sum,
        (Rows.LOCAL, Rows.SCATTERED, False): RowMoves._take_part,
        (Rows.LOCAL, Rows.SCATTERED, True): RowMoves._scatter,
        (Rows.SCATTERED, Rows.LOCAL, False): RowMoves._gather,
        (Rows.LOCAL, Rows.GLOBAL, False): RowMoves._spread,
        (Rows.LOCAL, Rows.GLOBAL, True): RowMoves._spread_partial,
        (Rows.GLOBAL, Rows.LOCAL, True): RowMoves._collect,
    }
)
"""The collectives for (source, target, is_partial)."""


def moves_of_step(groups: Groups) -> RowMoves:
    """Return the moves of the running step, with the row counts that all shards agreed on.

    Raises RuntimeError for a forward without such a plan.
    """
    batch = get_forward_context().batch
    if batch is None or batch.step_plan is None:
        raise RuntimeError(
            "found a forward of a data-parallel shard without a plan; wanted a step that all shards agreed on"
        )
    return RowMoves(batch.step_plan, groups, groups.shard)


def moves_of_shard(x: Tensor, groups: Groups) -> RowMoves:
    """Return the moves of rows [T, ...] among this shard's ranks, which need no agreed plan."""
    return RowMoves(StepPlan((len(x),)), groups, 0)
