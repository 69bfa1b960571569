"""Routers: which experts a token goes to, and with which weights."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import MoeConfig
from sglcore.checkpoint.moe_spec import RoutingSpec
from sglcore.layers.build_scope import Scope
from sglcore.layers.linear import Linear
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
    gate = routing.gate
    if routing.score == "softmax":
        return SoftmaxRouting(build, gate, moe, routing.bias)
    if routing.score == "group_limited":
        return GroupLimitedRouting(build, gate, moe)
    if routing.score == "sigmoid":
        return SigmoidRouting(build, gate, moe)
    return HashRouting(build, gate, moe) if routing.score == "table" else SqrtSoftplusRouting(build, gate, moe)


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


class _Gate:
    """A router's linear layer without bias, in float32: [T, H] to logits [T, E]."""

    __slots__ = ("_linear", "weight")

    def __init__(self, build: Scope, moe: MoeConfig) -> None:
        hidden = build.config.hidden_size
        self.weight = build.parameter("weight", moe.num_experts, hidden, dtype=torch.float32)
        self._linear = build.kernel(KernelTable.linear, build.rows(hidden).float(), self.weight, None)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._linear(hidden.float(), self.weight, None)


class GroupLimitedRouting:
    """Chooses the experts with the largest softmax probabilities, only in the `moe.top_groups`
    groups with the largest ones; the weights are these probabilities times `moe.scale`
    (`KernelTable.group_limited_routing`). Logits are float32."""

    __slots__ = ("_gate", "_route", "_rules")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig) -> None:
        self._gate = _Gate(build.at(gate), moe)
        self._rules = moe.experts_per_token, moe.num_groups, moe.top_groups, moe.scale
        logits = build.rows(moe.num_experts).float()
        self._route = build.kernel(KernelTable.group_limited_routing, logits, *self._rules)

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] with the dtype of `hidden`, and expert numbers [T, K], for `hidden`
        [T, H]; `input_ids` are not read.
        """
        weights, experts = self._route(self._gate(hidden), *self._rules)
        return weights.to(hidden.dtype), experts


class SigmoidRouting:
    """Chooses the experts with the largest sigmoid plus a bias for each expert, within the best
    groups. Their weights are the sigmoids without the bias, divided by their sum if
    `moe.normalize`, times `moe.scale` (`KernelTable.sigmoid_routing`). Logits are float32."""

    __slots__ = ("_gate", "_route", "_rules", "bias")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig) -> None:
        self._gate = _Gate(build.at(gate), moe)
        self.bias = _bias(build.at(gate), moe)
        self._rules = moe.experts_per_token, moe.num_groups, moe.top_groups, moe.normalize, moe.scale
        logits = build.rows(moe.num_experts).float()
        self._route = build.kernel(KernelTable.sigmoid_routing, logits, self.bias, *self._rules)

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] with the dtype of `hidden`, and expert numbers [T, K], for `hidden`
        [T, H]; `input_ids` are not read.
        """
        weights, experts = self._route(self._gate(hidden), self.bias, *self._rules)
        return weights.to(hidden.dtype), experts


class SqrtSoftplusRouting:
    """Chooses the experts with the largest sqrt(softplus(logit)) plus a bias for each expert. Their
    weights are without the bias, divided by their sum, times `moe.scale`
    (`KernelTable.sqrtsoftplus_routing`). Logits are float32."""

    __slots__ = ("_gate", "_route", "_rules", "bias")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig) -> None:
        self._gate = _Gate(build.at(gate), moe)
        self.bias = _bias(build.at(gate), moe)
        self._rules = moe.experts_per_token, moe.scale
        logits = build.rows(moe.num_experts).float()
        self._route = build.kernel(KernelTable.sqrtsoftplus_routing, logits, self.bias, *self._rules)

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] with the dtype of `hidden`, and expert numbers [T, K], for `hidden`
        [T, H]; `input_ids` are not read.
        """
        weights, experts = self._route(self._gate(hidden), self.bias, *self._rules)
        return weights.to(hidden.dtype), experts


class HashRouting:
    """Takes each token's experts from a table by token id, `tid2eid` [vocab, K]; their weights are
    those of `SqrtSoftplusRouting` (`KernelTable.hash_routing`).
    """

    __slots__ = ("_gate", "_route", "_scale", "table")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig) -> None:
        scope = build.at(gate)
        self._gate = _Gate(scope, moe)
        self.table = scope.parameter("tid2eid", build.config.vocab_size, moe.experts_per_token, dtype=torch.int32)
        build.weights.bounds.append((f"{scope.prefix}tid2eid", self.table, moe.num_experts))
        self._scale = moe.scale
        logits, ids = build.rows(moe.num_experts).float(), build.indices()
        self._route = build.kernel(KernelTable.hash_routing, logits, ids, self.table, self._scale)

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights [T, K] with the dtype of `hidden`, and expert numbers [T, K], for `hidden`
        [T, H] and `input_ids` int [T], which are required.
        """
        assert input_ids is not None
        weights, experts = self._route(self._gate(hidden), input_ids, self.table, self._scale)
        return weights.to(hidden.dtype), experts


def _bias(gate: Scope, moe: MoeConfig) -> Tensor:
    return gate.parameter("e_score_correction_bias", moe.num_experts, dtype=torch.float32)
