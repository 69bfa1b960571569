"""Feed-forward blocks that clamp their factors to a limit: a dense block, and experts.

A gate selects the experts, or a table by token id does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import EXPERT_PARTS, MoeConfig
from sglcore.layers.build_scope import Scope
from sglcore.layers.linear import Linear
from sglcore.layers.mlp import GATE_AND_UP
from sglcore.layers.moe import expert_weights
from sglcore.runtime.kernels.table import KernelTable


class LimitedMlp:
    """down(silu(min(gate(x), limit)) * clamp(up(x), -limit, limit))."""

    __slots__ = ("_activate", "_limit", "down_proj", "gate_up_proj")

    def __init__(self, build: Scope, size: int, limit: float) -> None:
        hidden = build.config.hidden_size
        self.gate_up_proj = Linear(build, tuple((part, size) for part in GATE_AND_UP), hidden)
        self.down_proj = Linear(build, (("down_proj", hidden),), size)
        self._activate, self._limit = build.kernel(KernelTable.limited_silu_and_mul, build.rows(2 * size), limit), limit

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        return self.down_proj(self._activate(self.gate_up_proj(hidden), self._limit))


class LimitedMoe:
    """Gate and experts, all on this device."""

    __slots__ = ("_limit", "_moe", "_route", "w2", "w13")

    def __init__(self, build: Scope, moe: MoeConfig, limit: float, is_hashed: bool) -> None:
        """The arguments are those of `layer_kinds.Build.limited_experts`."""
        self._route = (HashRouting if is_hashed else SqrtSoftplusRouting)(build.at("gate"), moe)
        self.w13, self.w2 = expert_weights(build, moe, EXPERT_PARTS)
        self._limit = limit
        choices = build.rows(moe.experts_per_token), build.indices(moe.experts_per_token)
        given = build.rows(build.config.hidden_size), *choices, self.w13, self.w2, limit
        self._moe = build.kernel(KernelTable.limited_moe, *given)

    def __call__(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        """[T, H] and token ids int [T] to [T, H], the weighted sum of the chosen experts'
        outputs."""
        weights, experts = self._route(hidden, input_ids)
        return self._moe(hidden, weights.to(hidden.dtype), experts, self.w13, self.w2, self._limit)


class _Gate:
    """A router's linear layer in float32: [T, H] to logits [T, E]."""

    __slots__ = ("_linear", "weight")

    def __init__(self, build: Scope, moe: MoeConfig) -> None:
        hidden = build.config.hidden_size
        self.weight = build.parameter("weight", moe.num_experts, hidden, dtype=torch.float32)
        self._linear = build.kernel(KernelTable.linear, build.rows(hidden).float(), self.weight, None)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden.float(), self.weight, None)


class SqrtSoftplusRouting:
    """Chooses the experts with the largest sqrt(softplus(logit)) plus a bias for each expert; their
    weights are without the bias (`KernelTable.sqrtsoftplus_routing`)."""

    __slots__ = ("_gate", "_route", "_rules", "bias")

    def __init__(self, build: Scope, moe: MoeConfig) -> None:
        self._gate = _Gate(build, moe)
        self.bias = build.parameter("e_score_correction_bias", moe.num_experts, dtype=torch.float32)
        self._rules = moe.experts_per_token, moe.scale
        logits = build.rows(moe.num_experts).float()
        self._route = build.kernel(KernelTable.sqrtsoftplus_routing, logits, self.bias, *self._rules)

    def __call__(self, hidden: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights float32 [T, K] and experts [T, K] for hidden states [T, H]. Does not read
        `input_ids`."""
        return self._route(self._gate(hidden), self.bias, *self._rules)


class HashRouting:
    """Takes each token's experts from a table by token id, and their weights from the gate
    (`KernelTable.hash_routing`)."""

    __slots__ = ("_gate", "_route", "_scale", "table")

    def __init__(self, build: Scope, moe: MoeConfig) -> None:
        self._gate = _Gate(build, moe)
        self.table = build.parameter("tid2eid", build.config.vocab_size, moe.experts_per_token, dtype=torch.int32)
        build.weights.bounds.append((f"{build.prefix}tid2eid", self.table, moe.num_experts))
        self._scale = moe.scale
        logits, ids = build.rows(moe.num_experts).float(), build.indices()
        self._route = build.kernel(KernelTable.hash_routing, logits, ids, self.table, self._scale)

    def __call__(self, hidden: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights float32 [T, K] and experts [T, K] for hidden states [T, H] and token ids
        int [T]."""
        return self._route(self._gate(hidden), input_ids, self.table, self._scale)
