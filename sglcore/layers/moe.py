"""Mixture of experts: a gate chooses experts for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import MoeConfig
from sglcore.device.errors import ConfigError
from sglcore.layers.build_scope import Scope
from sglcore.layers.linear import Linear
from sglcore.runtime.kernels.mxfp4 import GROUP
from sglcore.runtime.kernels.table import KernelTable

Routing = Callable[[Tensor], tuple[Tensor, Tensor]]
"""[T, H] to weights [T, K] in the same dtype, and experts [T, K]."""


class SparseMoe:
    """Gate and experts, all on this device."""

    __slots__ = ("_moe", "_route", "w2", "w13")

    def __init__(
        self,
        build: Scope,
        moe: MoeConfig,
        gate: str,
        parts: Sequence[str],
        routing: Callable[[Scope, str, MoeConfig], Routing],
    ) -> None:
        """The arguments are those of `layer_kinds.Build.experts`; `routing` makes the router."""
        self._route = routing(build, gate, moe)
        self.w13, self.w2 = expert_weights(build, moe, parts)
        choices = build.rows(moe.experts_per_token), build.indices(moe.experts_per_token)
        self._moe = build.kernel(KernelTable.moe, build.rows(build.config.hidden_size), *choices, self.w13, self.w2)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to the weighted sum [T, H] of the chosen experts' outputs."""
        return self._moe(hidden, *self._route(hidden), self.w13, self.w2)


class ClampedMoe:
    """Gate with a bias, and experts with biases and a clamped activation, all on this device."""

    __slots__ = ("_clamp", "_moe", "_route", "b2", "b13", "w2", "w13")

    def __init__(self, build: Scope, moe: MoeConfig, alpha: float, limit: float) -> None:
        hidden, size, count = build.config.hidden_size, moe.intermediate_size, moe.num_experts
        each, choices = build.at("experts"), moe.experts_per_token
        self._route = SoftmaxRouting(build, "router", moe, bias=True)
        self.w13 = each.turned("gate_up_proj", count, 2 * size, hidden)
        self.b13 = each.parameter("gate_up_proj_bias", count, 2 * size)
        self.w2 = each.turned("down_proj", count, hidden, size)
        self.b2 = each.parameter("down_proj_bias", count, hidden)
        self._clamp = alpha, limit
        given = build.rows(hidden), build.rows(choices), build.indices(choices), *self._weights, *self._clamp
        self._moe = build.kernel(KernelTable.clamped_moe, *given)

    @property
    def _weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w13, self.b13, self.w2, self.b2

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to the weighted sum [T, H] of the chosen experts' outputs."""
        return self._moe(hidden, *self._route(hidden), *self._weights, *self._clamp)


class Mxfp4Moe:
    """`ClampedMoe` with expert weights kept as the checkpoint's MXFP4 codes."""

    __slots__ = ("_clamp", "_moe", "_route", "weights")

    def __init__(self, build: Scope, moe: MoeConfig, alpha: float, limit: float) -> None:
        hidden, size, count = build.config.hidden_size, moe.intermediate_size, moe.num_experts
        each, choices = build.at("experts"), moe.experts_per_token
        self._route = SoftmaxRouting(build, "router", moe, bias=True)
        self.weights = (
            *_codes(each, "gate_up_proj", count, 2 * size, hidden),
            *_codes(each, "down_proj", count, hidden, size),
        )
        self._clamp = alpha, limit
        given = build.rows(hidden), build.rows(choices), build.indices(choices), *self.weights, *self._clamp
        self._moe = build.kernel(KernelTable.mxfp4_moe, *given)
        if self._moe is None:
            raise ConfigError("no kernel takes these experts in 4 bits", remedy="use a checkpoint with plain experts")

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to the weighted sum [T, H] of the chosen experts' outputs."""
        assert self._moe is not None
        return self._moe(hidden, *self._route(hidden), *self.weights, *self._clamp)


def _codes(build: Scope, name: str, experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Declare codes, scales and bias of all experts, in the kernel table's layout."""
    groups, uint8 = (experts, outputs, inputs // GROUP), torch.uint8
    blocks = build.parameter(f"{name}_blocks", *groups, GROUP // 2, dtype=uint8)
    return (
        blocks,
        build.parameter(f"{name}_scales", *groups, dtype=uint8),
        build.parameter(f"{name}_bias", experts, outputs),
    )


class Relu2Moe:
    """Gate, and experts down(max(up(x), 0)^2), perhaps in a narrower space."""

    __slots__ = ("_moe", "_route", "fc1", "fc2", "w1", "w2")

    def __init__(self, build: Scope, moe: MoeConfig, latent: int) -> None:
        """`latent` is that of `layer_kinds.Build.relu2_experts`."""
        hidden, size, count, bias = (
            build.config.hidden_size,
            moe.intermediate_size,
            moe.num_experts,
            build.config.mlp_bias,
        )
        width, each, choices = latent or hidden, build.at("experts"), moe.experts_per_token
        self._route = SigmoidRouting(build, "gate", moe)
        self.fc1 = Linear(build, (("fc1_latent_proj", latent),), hidden, bias) if latent else None
        self.fc2 = Linear(build, (("fc2_latent_proj", hidden),), latent, bias) if latent else None
        self.w1 = each.expert_stacked("up_proj", count, (("up_proj.weight", size),), width)
        self.w2 = each.expert_stacked("down_proj", count, (("down_proj.weight", width),), size)
        given = build.rows(width), build.rows(choices), build.indices(choices), self.w1, self.w2
        self._moe = build.kernel(KernelTable.relu2_moe, *given)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to the weighted sum [T, H] of the chosen experts' outputs."""
        narrow = hidden if self.fc1 is None else self.fc1(hidden)
        mixed = self._moe(narrow, *self._route(hidden), self.w1, self.w2)
        return mixed if self.fc2 is None else self.fc2(mixed)


def expert_weights(build: Scope, moe: MoeConfig, parts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Declare the weights of E experts and return them: gate over up [E, 2 * I, H], and down [E, H,
    I]. `parts` are the checkpoint's names, as in `layer_kinds.Build.experts`."""
    hidden, size, count = build.config.hidden_size, moe.intermediate_size, moe.num_experts
    if len(parts) == 2:
        both, down = parts
        gate_up = build.parameter(f"{both}.weight", count, 2 * size, hidden)
        return gate_up, build.parameter(f"{down}.weight", count, hidden, size)
    each, (first, second, down) = build.at("experts"), parts
    gate_up = ((f"{first}.weight", size), (f"{second}.weight", size))
    w13 = each.expert_stacked("gate_up_proj", count, gate_up, hidden)
    return w13, each.expert_stacked("down_proj", count, ((f"{down}.weight", hidden),), size)


class SoftmaxRouting:
    """Chooses the experts with the largest softmax probabilities (`KernelTable.top_k_routing`)."""

    __slots__ = ("_normalize", "_route", "_top_k", "gate")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig, bias: bool = False) -> None:
        self.gate = Linear(build, ((gate, moe.num_experts),), build.config.hidden_size, bias, may_round=False)
        self._top_k, self._normalize = moe.experts_per_token, moe.normalize
        logits = build.rows(moe.num_experts)
        self._route = build.kernel(KernelTable.top_k_routing, logits, self._top_k, self._normalize)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] to weights [T, K] and experts [T, K], as `Routing` defines."""
        return self._route(self.gate(hidden), self._top_k, self._normalize)


class GroupLimitedRouting:
    """Chooses the experts with the largest softmax probabilities, only in the groups with the
    largest ones. Logits are float32."""

    __slots__ = ("_linear", "_route", "_rules", "weight")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig) -> None:
        experts, hidden = moe.num_experts, build.config.hidden_size
        self.weight = build.at(gate).parameter("weight", experts, hidden, dtype=torch.float32)
        self._rules = moe.experts_per_token, moe.num_groups, moe.top_groups, moe.scale
        self._linear = build.kernel(KernelTable.linear, build.rows(hidden).float(), self.weight, None)
        self._route = build.kernel(KernelTable.group_limited_routing, build.rows(experts).float(), *self._rules)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] to weights [T, K] and experts [T, K], as `Routing` defines."""
        weights, experts = self._route(self._linear(hidden.float(), self.weight, None), *self._rules)
        return weights.to(hidden.dtype), experts


class SigmoidRouting:
    """Chooses the experts with the largest sigmoid plus a bias for each expert, within the best
    groups; their weights are without the bias (`KernelTable.sigmoid_routing`). Logits are
    float32."""

    __slots__ = ("_linear", "_route", "_rules", "bias", "weight")

    def __init__(self, build: Scope, gate: str, moe: MoeConfig) -> None:
        scope, experts, hidden = build.at(gate), moe.num_experts, build.config.hidden_size
        self.weight = scope.parameter("weight", experts, hidden, dtype=torch.float32)
        self.bias = scope.parameter("e_score_correction_bias", experts, dtype=torch.float32)
        self._rules = moe.experts_per_token, moe.num_groups, moe.top_groups, moe.normalize, moe.scale
        self._linear = build.kernel(KernelTable.linear, build.rows(hidden).float(), self.weight, None)
        logits = build.rows(experts).float()
        self._route = build.kernel(KernelTable.sigmoid_routing, logits, self.bias, *self._rules)

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] to weights [T, K] and experts [T, K], as `Routing` defines."""
        weights, experts = self._route(self._linear(hidden.float(), self.weight, None), self.bias, *self._rules)
        return weights.to(hidden.dtype), experts
