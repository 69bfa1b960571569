"""Routers: which experts a token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import MoeConfig
from sglcore.checkpoint.moe_spec import RoutingSpec
from sglcore.layers.build_scope import Scope
from sglcore.layers.linear import Linear
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.table import KernelTable


class Routing(Protocol):
    """A router: maps hidden states [T, H] to the weights and the numbers of each token's
    experts."""

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[T, H] and, for a table by token id, the token ids int [T], to weights [T, K] with the
        dtype of `hidden`, and expert numbers int [T, K]. Other routers do not read the token ids.
        """
        ...


def make_routing(build: Scope, routing: RoutingSpec, moe: MoeConfig) -> Routing:
    """Return the router that `routing.score` names; `build` is the scope of the block, in which
    `routing.gate` names the linear layer.
    """
    if routing.score == "softmax":
        return SoftmaxRouting(build, routing.gate, moe, routing.bias)
    return FloatRouting(build, routing.gate, moe, FLOAT_SCORES[routing.score])


class SoftmaxRouting:
    """Chooses the experts with the largest softmax probabilities, which are their weights, divided
    by their sum if `moe.normalize` (`KernelTable.top_k_routing`). `moe.scale` is not used.
    """

    __slots__ = ("_normalize", "_route", "_top_k", "gate")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig, bias: bool = False) -> None:
        self.gate = Linear(build, ((gate, moe.num_experts),), build.config.hidden_size, bias, may_round=False)
        self._top_k, self._normalize = moe.experts_per_token, moe.normalize
        logits = build.rows(moe.num_experts)
        self._route = build.kernel(KernelTable.top_k_routing, logits, self._top_k, self._normalize)

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] with the dtype of `hidden`, and expert numbers [T, K], for `hidden`
        [T, H]; `input_ids` are not read.
        """
        return self._route(self.gate(hidden), self._top_k, self._normalize)


@dataclass(frozen=True, slots=True)
class FloatScore:
    """A way to choose experts by float32 logits: the kernel, and what it reads after the logits."""

    entry: Entry[Any]
    """The kernel's entry in the table: called with logits [T, E], the token ids if
    `reads_token_ids`, the operand if there is one, and the rules."""
    rules: Callable[[MoeConfig], tuple[float, ...]]
    """Returns the kernel's numbers."""
    operand: Callable[[Scope, MoeConfig], Tensor] | None = None
    """Declares the tensor that the checkpoint has in addition to the logits' weight. None: it has
    none."""
    reads_token_ids: bool = False
    """Whether the experts depend on the token ids."""


def _bias(gate: Scope, moe: MoeConfig) -> Tensor:
    return gate.parameter("e_score_correction_bias", moe.num_experts, dtype=torch.float32)


def _table(gate: Scope, moe: MoeConfig) -> Tensor:
    table = gate.parameter("tid2eid", gate.config.vocab_size, moe.experts_per_token, dtype=torch.int32)
    gate.weights.bounds.append((f"{gate.prefix}tid2eid", table, moe.num_experts))
    return table


FLOAT_SCORES: Mapping[str, FloatScore] = MappingProxyType(
    {
        "group_limited": FloatScore(
            KernelTable.group_limited_routing,
            lambda moe: (moe.experts_per_token, moe.num_groups, moe.top_groups, moe.scale),
        ),
        "sigmoid": FloatScore(
            KernelTable.sigmoid_routing,
            lambda moe: (moe.experts_per_token, moe.num_groups, moe.top_groups, moe.normalize, moe.scale),
            _bias,
        ),
        "sqrtsoftplus": FloatScore(
            KernelTable.sqrtsoftplus_routing, lambda moe: (moe.experts_per_token, moe.scale), _bias
        ),
        "table": FloatScore(KernelTable.hash_routing, lambda moe: (moe.scale,), _table, reads_token_ids=True),
    }
)
"""The scores of `RoutingSpec` with float32 logits."""


class FloatRouting:
    """A router with float32 logits from a linear layer without bias, [T, H] to [T, E]; `score`
    says how it chooses experts. `operands`: the further tensors that it reads."""

    __slots__ = ("_linear", "_reads_token_ids", "_route", "_rules", "operands", "weight")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig, score: FloatScore) -> None:
        scope, hidden = build.at(gate), build.config.hidden_size
        self.weight = scope.parameter("weight", moe.num_experts, hidden, dtype=torch.float32)
        self.operands = () if score.operand is None else (score.operand(scope, moe),)
        self._linear = build.kernel(KernelTable.linear, build.rows(hidden).float(), self.weight, None)
        self._rules, self._reads_token_ids = score.rules(moe), score.reads_token_ids
        ids = (build.indices(),) if score.reads_token_ids else ()
        logits = build.rows(moe.num_experts).float()
        self._route = build.kernel(score.entry, logits, *ids, *self.operands, *self._rules)

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] with the dtype of `hidden`, and expert numbers [T, K], for `hidden`
        [T, H]. A router that reads token ids requires `input_ids`, int [T].
        """
        assert input_ids is not None or not self._reads_token_ids
        ids = (input_ids,) if self._reads_token_ids else ()
        logits = self._linear(hidden.float(), self.weight, None)
        weights, experts = self._route(logits, *ids, *self.operands, *self._rules)
        return weights.to(hidden.dtype), experts
