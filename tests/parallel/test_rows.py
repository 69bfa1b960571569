"""Rows arrive at the documented index for any shards, including idle ones; a move that is off by
one row is caught."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.parallel.rank_groups import Groups
from sglcore.runtime.parallel.row_distribution import MOVES, RowMoves, Rows
from sglcore.worker.step_plan import StepPlan
from sglcore.worker.topology import Topology
from tests.parallel.topologies import on_topology, rows_of

SIZE = 3
LOCAL, SCATTERED, GLOBAL = Rows.LOCAL, Rows.SCATTERED, Rows.GLOBAL


def plans(shards: int) -> list[StepPlan]:
    """Plans that are even, uneven, with idle shards, padded and not; each has at least one row."""
    rng = np.random.default_rng(shards)
    counts = [tuple(rng.choice([0, 0, 1, 2, 5, 8], shards).tolist()) for _ in range(12)]
    counts = [each for each in counts if sum(each)] + [(4,) * shards, (1, *(0,) * (shards - 1))]
    return [StepPlan(each, is_padded) for each in counts for is_padded in (False, True)]


def part(x: Tensor, rank: int, size: int) -> Tensor:
    """The summand of a rank; the sum over all ranks is `x`."""
    own = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank), dtype=x.dtype)
    others = [torch.randn(x.shape, generator=torch.Generator().manual_seed(r), dtype=x.dtype) for r in range(size - 1)]
    return own if rank < size - 1 else x - sum(others, torch.zeros_like(x))


def every_move(groups: Groups, given: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Every move of the table on every plan."""
    ranks, shard, found = groups.attn_tp, groups.shard, []
    for plan in plans(groups.place.topology.dp):
        moves = RowMoves(plan, groups, shard)
        mine = rows_of(shard, plan.global_num_tokens[shard], SIZE)
        every = torch.cat([rows_of(each, count, SIZE) for each, count in enumerate(plan.global_num_tokens)])
        sources = {
            (LOCAL, False): mine,
            (LOCAL, True): part(mine, ranks.rank, ranks.size),
            (SCATTERED, False): moves.move(mine.clone(), LOCAL, SCATTERED),
            (GLOBAL, True): part(every, groups.tp.rank, groups.tp.size),
        }
        found.append(
            {
                f"{source.value} {'partial ' * is_partial}to {target.value}": moves.move(
                    sources[source, is_partial].clone(), source, target, is_partial=is_partial
                ).clone()
                for source, target, is_partial in MOVES
            }
        )
    return found


def check(topology: Topology, found: list[Any]) -> None:
    width = topology.attn_tp
    for step, plan in enumerate(plans(topology.dp)):
        local = [rows_of(shard, count, SIZE) for shard, count in enumerate(plan.global_num_tokens)]
        for rank, told in enumerate(found):
            assert isinstance(told, list), told
            shard, place = rank // width, rank % width
            mine, each = local[shard], plan.sizes(width)[shard] // width
            padded = torch.zeros(each * width, SIZE, dtype=mine.dtype)
            padded[: len(mine)] = mine
            wanted = {"local": mine, "scattered": padded[place * each : (place + 1) * each], "global": torch.cat(local)}
            for name, row_distribution in told[step].items():
                torch.testing.assert_close(
                    row_distribution, wanted[name.split()[-1]], atol=1e-12, rtol=0, msg=f"{plan} {name}"
                )


@pytest.mark.parametrize(
    "topology", [Topology(2), Topology(2, 2), Topology(3, 3), Topology(4, 2), Topology(4, 4)], ids=str
)
def test_every_move_brings_the_rows_that_it_says(topology: Topology, tmp_path: Path) -> None:
    check(topology, on_topology(topology, tmp_path, every_move))


def everybody_writes() -> None:
    """Rows that each rank of a shard has whole are summed once per rank."""
    own = RowMoves._spread_by_sum
    changed: Any = RowMoves
    changed._spread_by_sum = lambda self, x, is_partial: own(self, x, is_partial=True)


def one_row_late() -> None:
    """A shard's rows are placed one row too late."""
    own = RowMoves._spread_by_sum

    def spread(self: RowMoves, x: Tensor, is_partial: bool) -> Tensor:
        return own(self, x, is_partial).roll(1, 0)

    changed: Any = RowMoves
    changed._spread_by_sum = spread


def not_rounded() -> None:
    """Sizes are not rounded up to a multiple of the ranks that share them."""
    changed: Any = StepPlan
    changed.sizes = lambda self, width: (
        (max(self.global_num_tokens),) * len(self.global_num_tokens) if self.is_padded else self.global_num_tokens
    )


def padding_stays() -> None:
    """Padding rows stay in the result."""
    from sglcore.runtime.parallel import row_distribution

    changed: Any = row_distribution
    changed._joined = lambda by_shard, counts: by_shard.flatten(0, 1)


@pytest.mark.parametrize("defect", [everybody_writes, one_row_late, not_rounded, padding_stays])
def test_a_move_that_errs_is_caught(defect: Callable[[], None], tmp_path: Path) -> None:
    topology = Topology(4, 2)
    found = on_topology(topology, tmp_path, every_move, defect=defect)
    with pytest.raises(AssertionError):
        check(topology, found)
