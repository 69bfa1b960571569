"""The groups of one rank, by topology: tensor parallel, attention, experts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from sglcore.runtime.parallel.expert_dispatch import Dispatcher, MakeDispatcher
from sglcore.runtime.parallel.pending_collective import CollectiveError
from sglcore.runtime.parallel.process_group import AnyGroup, Group
from sglcore.runtime.parallel.single_rank import Alone
from sglcore.sampling.sampler import Sampler
from sglcore.worker.step_plan import StepPlan
from sglcore.worker.topology import Communication, Place


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of this rank.

    `tp`: the tensor-parallel ranks of the layers. `attn_tp`: the ranks that share each request's
    heads; its rank 0 decides what is sampled. `ep`: the ranks that experts are distributed over,
    one rank if each holds a part of every expert. `dispatch` makes expert dispatchers for
    `max_rows` rows per rank.
    """

    tp: Group
    place: Place
    communication: Communication
    attn_tp: AnyGroup
    ep: AnyGroup
    dispatch: MakeDispatcher
    max_rows: int

    @property
    def shard(self) -> int:
        """The data-parallel shard of requests that this rank serves."""
        return self.place.rank % self.tp.size // self.attn_tp.size

    def make_dispatcher(self, each: int) -> Dispatcher:
        """Return a dispatcher for `each` expert places on every rank of `ep`."""
        return self.dispatch(self.ep, each, self.max_rows)

    @property
    def has_experts_whole(self) -> bool:
        """True if each rank holds some experts whole, False if it holds a part of every expert."""
        return self.ep.size > 1

    @property
    def has_shards(self) -> bool:
        """Whether some ranks serve other requests than this one (data parallelism)."""
        return self.place.topology.dp > 1

    def make_sampler(self, *given: Any, **named: Any) -> Sampler:
        """Return a sampler; rank 0 of `attn_tp` decides what it draws. The parameters are those of
        `Sampler`.
        """
        from sglcore.runtime.parallel.rank_decided_sampling import SampledByOne

        return SampledByOne(*given, group=self.attn_tp, **named)

    def reason_against_graphs(self, kind: str) -> str:
        """Return why the ranks cannot replay steps as this kind of graph; empty if they can."""
        backend = self.communication.backend
        if self.has_experts_whole and not self.dispatch.is_fixed:
            return f"rows go to their experts over {backend} in numbers that the host waits for (--expert-dispatch)"
        if not self.ep.goes_into(kind):
            return f"rows go to their experts over {backend}, and no {kind} graph can contain that"
        if self.tp.goes_into(kind):
            return ""
        return f"sums of ranks over {backend} run between kernels, and no {kind} graph can contain them"

    def plan_of_bucket(self, rows: int) -> StepPlan | None:
        """Return the plan under which this rank captures decode graphs of `rows` rows; None if
        there is one shard.
        """
        return StepPlan.of_bucket(rows, self.place.topology.dp, self.shard) if self.has_shards else None

    def check_same(self, what: str, value: object) -> None:
        """Raise CollectiveError on every rank unless `value`, which must have the same text on all
        ranks if it is equal, is equal on all; `what` names it. Waits for all ranks.
        """
        word = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7])
        if self.tp.least(word) != -self.tp.least(-word):
            raise CollectiveError(f"rank {self.place.rank} has the {what} {value}, and another rank has others")

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        self.tp.close()


def divided(
    world: Group, place: Place, communication: Communication, make: MakeDispatcher, max_rows: int = 0
) -> Groups:
    """Return the groups of the topology; every rank calls this.

    `make` makes expert dispatchers. `max_rows` is the maximum number of rows of a step, which the
    ranks of `attn_tp` divide: each sends its part of them to experts.
    """
    topology = place.topology

    def group(name: str) -> AnyGroup:
        ranks = topology.groups(name)
        if len(ranks) == 1:
            return world
        return Alone() if len(ranks[0]) == 1 else world.part(name, ranks)

    attn_tp = group("attn_tp")
    most = -(-max_rows // attn_tp.size)
    return Groups(world, place, communication, attn_tp, group("ep"), make, most)
