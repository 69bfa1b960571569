"""The sparse feed-forward block: a gate chooses experts for each token."""

from __future__ import annotations

from torch import Tensor

from sglcore.checkpoint.config import MoeConfig
from sglcore.layers.linear import Linear
from sglcore.layers.scope import Scope
from sglcore.runtime.kernels.table import KernelTable


class SparseMoe:
    """Gate and experts, every one of them here."""

    __slots__ = ("_moe", "_normalize", "_route", "_top_k", "gate", "w2", "w13")

    def __init__(self, build: Scope, moe: MoeConfig) -> None:
        hidden, size, experts = build.config.hidden_size, moe.intermediate_size, build.at("experts")
        self.gate = Linear(build, (("gate", moe.num_experts),), hidden, may_round=False)
        parts = (("gate_proj.weight", size), ("up_proj.weight", size))
        self.w13 = experts.expert_stacked(moe.num_experts, parts, hidden)
        self.w2 = experts.expert_stacked(moe.num_experts, (("down_proj.weight", hidden),), size)
        self._top_k = moe.experts_per_token
        self._normalize = moe.normalize
        logits, k = build.rows(moe.num_experts), moe.experts_per_token
        self._route = build.kernel(KernelTable.top_k_routing, logits, k, moe.normalize)
        choices = build.rows(k), build.indices(k)
        self._moe = build.kernel(KernelTable.moe, build.rows(hidden), *choices, self.w13, self.w2)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to the weighted sum [T, H] of the chosen experts' outputs."""
        weights, experts = self._route(self.gate(hidden), self._top_k, self._normalize)
        return self._moe(hidden, weights, experts, self.w13, self.w2)
