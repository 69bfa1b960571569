"""Where token rows are, and how they move between the ranks of one step.

A place and a value that is whole or still a sum over a group make a state; `move` is a table of what leads from one state to
another, in one or two collectives. Where a group is one rank wide its collectives do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType

from torch import Tensor

from sglcore.device.plan import StepPlan
from sglcore.runtime.forward_context import get_forward_context
from sglcore.runtime.parallel.group import Groups


class Rows(Enum):
    """`LOCAL`: those of this rank's shard of requests, on each of its ranks. `SCATTERED`: of those the equal part of this rank,
    the last ones filled up with zeros. `GLOBAL`: those of all shards side by side, on every rank."""

    LOCAL = "local"
    SCATTERED = "scattered"
    GLOBAL = "global"


class RowMoves:
    """The moves of one step on one rank; `plan` says how many rows each shard has, and `shard` which is this rank's.

    What is moved is used up. A partial value is a part of a sum: over the ranks of the shard for rows in `LOCAL`, over all
    of them for `GLOBAL`. What comes out is whole."""

    __slots__ = ("_groups", "_plan", "_shard")

    def __init__(self, plan: StepPlan, groups: Groups, shard: int) -> None:
        self._plan, self._groups, self._shard = plan, groups, shard

    @property
    def count(self) -> int:
        """Rows of this rank's shard."""
        return self._plan.global_num_tokens[self._shard]

    def move(self, x: Tensor, source: Rows, target: Rows, *, is_partial: bool = False) -> Tensor:
        """Rows [N, ...] of one place as those of another. Raises KeyError for a move that nobody makes."""
        return MOVES[source, target, is_partial](self, x)

    def own_part(self, x: Tensor) -> Tensor:
        """Of rows in `LOCAL` those of this rank, without what fills them up in `SCATTERED`."""
        each = self._part_size()
        return x[self._groups.attn_tp.rank * each : (self._groups.attn_tp.rank + 1) * each]

    def _is_padded(self) -> bool:
        return self._plan.is_padded

    def _own_size(self) -> int:
        """Rows that this shard brings to an exchange."""
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
        """Everybody's equal part, without what only fills up."""
        every = self._groups.tp.all_gather(x.contiguous())
        by_shard = every.view(len(self._plan.global_num_tokens), self._own_size(), *x.shape[1:])
        return _joined(by_shard, self._plan.global_num_tokens)

    def _spread_by_sum(self, x: Tensor, is_partial: bool) -> Tensor:
        """Into zeros at the place of this shard, by one of its ranks where each has them whole, then the sum."""
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
    """`x` with zeros behind it, so that it has so many rows."""
    if len(x) == rows:
        return x
    grown = x.new_zeros(rows, *x.shape[1:])
    grown[: len(x)] = x
    return grown


def _joined(by_shard: Tensor, counts: tuple[int, ...]) -> Tensor:
    """[shards, N, ...] to the first rows of each, one after the other."""
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
"""Which collectives lead from where to where; True: of values that are parts of a sum."""


def moves_of_step(groups: Groups) -> RowMoves:
    """Those of the step that runs, as all shards agreed on it. Raises RuntimeError for a forward that nobody agreed on."""
    batch = get_forward_context().batch
    if batch is None or batch.step_plan is None:
        raise RuntimeError("found a forward of one shard of requests without a plan; wanted a step that all agreed on")
    return RowMoves(batch.step_plan, groups, groups.shard)


def moves_of_shard(x: Tensor, groups: Groups) -> RowMoves:
    """Those of the rows [T, ...] of this rank's shard among its own ranks, which need nobody's agreement."""
    return RowMoves(StepPlan((len(x),)), groups, 0)
