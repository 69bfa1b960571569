"""Expert parallel layers: each rank has whole experts; tokens are sent to the ranks of their
experts, and the results come back."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import MoeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.checkpoint.parallel.tensor_parallel import Range
from sglcore.layers.build_scope import Scope
from sglcore.layers.expert_routing import make_routing
from sglcore.layers.rank_part import Cut
from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.parallel.expert_dispatch import Dispatcher
from sglcore.runtime.parallel.expert_placement import Placement, in_order
from sglcore.runtime.parallel.rank_groups import Groups
from sglcore.runtime.parallel.row_distribution import Rows, moves_of_shard


class DispatchedMoe:
    """Mixture of experts on several ranks: each has the whole router, and its own experts. Rows are
    sent to the ranks of their experts, and the results come back."""

    __slots__ = ("_dispatcher", "_groups", "_moe", "_places", "_route", "w2", "w13")

    def __init__(
        self,
        build: Scope,
        moe: MoeConfig,
        spec: ExpertSpec,
        routing: RoutingSpec,
        placement: Placement,
        groups: Groups,
        dispatcher: Dispatcher,
    ) -> None:
        """The first four arguments are those of `Experts`; ranks in `placement` are those of
        the group `ep`."""
        group = groups.ep
        self._groups, self._dispatcher = groups, dispatcher
        self._route = make_routing(build, routing, moe)
        self.w13, self.w2 = held_weights(build, moe, spec.parts, placement.of_rank(group.rank).tolist())
        self._places = torch.from_numpy(placement.places_for(group.rank)).to(build.weights.device)
        one = build.rows(1), build.indices(1)
        self._moe = build.kernel(KernelTable.moe, build.rows(build.config.hidden_size), *one, self.w13, self.w2)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to [T, H], the weighted sum of the chosen experts' outputs, on every rank of the
        shard. If several ranks have the same tokens, each sends a part of them, and the parts are
        gathered."""
        moves = moves_of_shard(hidden, self._groups)
        return moves.move(self._mixed(moves.own_part(hidden)), Rows.SCATTERED, Rows.LOCAL)

    def _mixed(self, hidden: Tensor) -> Tensor:
        weights, chosen = self._route(hidden)
        places = self._places[chosen.long()]
        dispatched = self._dispatcher.launch_dispatch(hidden, places)
        given = dispatched.wait()
        made = self._run(given.rows, given.experts)
        parts = self._dispatcher.launch_combine(made, dispatched).wait()
        return torch.einsum("tk,tkh->th", weights.float(), parts.float()).to(hidden.dtype)

    def _run(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Run this rank's experts on rows [R, H]; `experts` int32 [R] is each row's expert, as
        numbered on this rank. Returns the outputs [R, H], not yet weighted; R may be 0."""
        if not len(rows):
            return rows
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        return self._moe(rows, ones, experts.unsqueeze(1), self.w13, self.w2)


def dispatched(
    build: Scope,
    moe: MoeConfig,
    spec: ExpertSpec,
    routing: RoutingSpec,
    groups: Groups,
) -> DispatchedMoe:
    """Return a `DispatchedMoe` with consecutive experts on each rank, and a dispatcher of `groups`.
    The first four arguments are those of `Experts`; the experts must be gated, which is not
    checked here."""
    placement = in_order(moe.num_experts, groups.ep.size)
    return DispatchedMoe(build, moe, spec, routing, placement, groups, groups.make_dispatcher(placement.each))


def held_weights(build: Scope, moe: MoeConfig, parts: Sequence[str], held: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Declare the weights of the N experts with the numbers `held`, in this order, and return them:
    gate over up [N, 2 * I, H], and down [N, H, I]. `parts` are the names of gate, up and down of
    each expert, or two names of weights of all experts. Other experts in the checkpoint are not
    read."""
    hidden, size = build.config.hidden_size, moe.intermediate_size
    ranges = [(expert, expert + 1) for expert in held]
    if len(parts) == 2:
        both, down = parts
        _cut(build, f"{both}.weight", moe.num_experts, ranges)
        _cut(build, f"{down}.weight", moe.num_experts, ranges)
        w13 = build.parameter(f"{both}.weight", len(held), 2 * size, hidden)
        return w13, build.parameter(f"{down}.weight", len(held), hidden, size)
    each, (first, second, down) = build.at("experts"), parts
    _cut(each, "gate_up_proj", moe.num_experts, ranges)
    _cut(each, "down_proj", moe.num_experts, ranges)
    names = "|".join(map(re.escape, parts))
    build.weights.elsewhere.append(rf"{re.escape(each.prefix)}\d+\.({names})\.\w+")
    gate_up = ((f"{first}.weight", size), (f"{second}.weight", size))
    w13 = each.expert_stacked("gate_up_proj", held, gate_up, hidden)
    return w13, each.expert_stacked("down_proj", held, ((f"{down}.weight", hidden),), size)


def _cut(scope: Scope, name: str, whole: int, ranges: Sequence[Range]) -> None:
    scope.weights.cuts[scope.prefix + name] = Cut(0, whole, tuple(ranges))
