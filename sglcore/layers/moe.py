"""The sparse feed-forward block: a gate chooses experts for each token."""

from __future__ import annotations

from torch import Tensor

from sglcore.checkpoint.config import MoeConfig
from sglcore.layers.build import Build
from sglcore.layers.linear import Linear
from sglcore.layers.program import Operation, Stage

ROUTED = ("rows", "row_weights", "row_experts")
"""What reaches the experts: hidden rows, the weight of each choice, and the experts chosen."""


class SparseMoe:
    """Gate and experts. On one rank, dispatch and combine hand on what they get: every expert is here."""

    __slots__ = ("_moe", "_normalize", "_route", "_top_k", "gate", "w2", "w13")

    def __init__(self, build: Build, moe: MoeConfig) -> None:
        hidden, size, experts = build.config.hidden_size, moe.intermediate_size, build.at("experts")
        self.gate = Linear(build.at("gate"), hidden, moe.num_experts, may_round=False)
        parts = (("gate_proj.weight", size), ("up_proj.weight", size))
        self.w13 = experts.expert_stacked(moe.num_experts, parts, hidden)
        self.w2 = experts.expert_stacked(moe.num_experts, (("down_proj.weight", hidden),), size)
        self._top_k = moe.experts_per_token
        self._normalize = moe.normalize
        self._route = build.kernels.top_k_routing
        self._moe = build.kernels.moe

    def stages(self, attention: tuple[Operation, ...], norm: Operation) -> tuple[Stage, ...]:
        """attention, norm, gate, dispatch | experts, combine | output."""
        gate = Operation("gate", self.choose, takes=("hidden",), gives=("hidden", "weights", "experts"))
        dispatch = Operation("dispatch", _same, takes=("hidden", "weights", "experts"), gives=ROUTED)
        experts = Operation("experts", self.mix, takes=ROUTED, gives=("partial",))
        combine = Operation("combine", _same_one, takes=("partial",), gives=("combined",))
        output = Operation("output", _same_one, takes=("combined",), gives=("hidden",))
        first = Stage("attention", (*attention, norm, gate, dispatch))
        return first, Stage("experts", (experts, combine)), Stage("output", (output,))

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, H] to itself, the weights [T, K], and the experts int [T, K]."""
        weights, experts = self._route(self.gate(hidden), self._top_k, self._normalize)
        return hidden, weights, experts

    def mix(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs, [T, H]."""
        return self._moe(rows, weights, experts, self.w13, self.w2)


def _same(*values: Tensor) -> tuple[Tensor, ...]:
    return values


def _same_one(value: Tensor) -> Tensor:
    return value
