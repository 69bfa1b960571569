"""Mixture of experts: a router chooses experts for each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import MoeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec, RoutingSpec
from sglcore.checkpoint.quantization_config import has_mxfp4_experts
from sglcore.core.errors import ConfigError
from sglcore.layers.build_scope import Scope
from sglcore.layers.expert_routing import Routing, make_routing
from sglcore.layers.linear import Linear
from sglcore.runtime.kernels.mxfp4 import GROUP
from sglcore.runtime.kernels.table import KernelTable

Moe: TypeAlias = "GatedMoe | ClampedMoe | Mxfp4Moe | Relu2Moe"
"""A router and experts, all on this device."""


def make_experts(build: Scope, moe: MoeConfig, spec: ExpertSpec, routing: RoutingSpec) -> Moe:
    """Return a router and the experts, all on this device; `build` is the scope of the block.
    Clamped experts are MXFP4 codes if the checkpoint has these and the kernels read them. Raises
    `ConfigError` for such codes in a form that no kernel takes."""
    route = make_routing(build, routing, moe)
    if spec.form == "relu2":
        return Relu2Moe(build, moe, spec, route)
    if spec.form == "clamped":
        return (Mxfp4Moe if reads_mxfp4(build) else ClampedMoe)(build, moe, spec, route)
    return GatedMoe(build, moe, spec, route)


def reads_mxfp4(build: Scope) -> bool:
    """Return whether the checkpoint's experts are MXFP4 codes, and the kernels read these."""
    return build.kernels.mxfp4_moe is not None and has_mxfp4_experts(build.config.raw)


class GatedMoe:
    """A router and gated experts. If `spec.form` is "limited", `spec.limit` bounds their factors,
    as in `LimitedMlp`."""

    __slots__ = ("_limit", "_moe", "_route", "w2", "w13")

    def __init__(self, build: Scope, moe: MoeConfig, spec: ExpertSpec, route: Routing) -> None:
        self._route = route
        self.w13, self.w2 = expert_weights(build, moe, spec.parts)
        self._limit = (spec.limit,) if spec.form == "limited" else ()
        choices = build.rows(moe.experts_per_token), build.indices(moe.experts_per_token)
        given = build.rows(build.config.hidden_size), *choices, self.w13, self.w2
        self._moe: Callable[..., Tensor] = (
            build.kernel(KernelTable.limited_moe, *given, *self._limit)
            if self._limit
            else build.kernel(KernelTable.moe, *given)
        )

    @property
    def bias(self) -> Tensor | None:
        """The bias added after the down projections: none."""
        return None

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """[T, H] to [T, H], the weighted sum of the chosen experts' outputs. `input_ids`, int [T],
        are the token ids for a router by token id."""
        return self._moe(hidden, *self._route(hidden, input_ids), self.w13, self.w2, *self._limit)


class ClampedMoe:
    """A router, and experts with biases and a clamped activation (`KernelTable.clamped_moe`); rows
    of gate and up alternate.
    """

    __slots__ = ("_clamp", "_moe", "_route", "b2", "b13", "w2", "w13")

    def __init__(self, build: Scope, moe: MoeConfig, spec: ExpertSpec, route: Routing) -> None:
        hidden, size, count = build.config.hidden_size, moe.intermediate_size, moe.num_experts
        each, choices = build.at("experts"), moe.experts_per_token
        self._route = route
        self.w13 = each.turned("gate_up_proj", count, 2 * size, hidden)
        self.b13 = each.parameter("gate_up_proj_bias", count, 2 * size)
        self.w2 = each.turned("down_proj", count, hidden, size)
        self.b2 = each.parameter("down_proj_bias", count, hidden)
        self._clamp = spec.alpha, spec.limit
        given = build.rows(hidden), build.rows(choices), build.indices(choices), *self._weights, *self._clamp
        self._moe = build.kernel(KernelTable.clamped_moe, *given)

    @property
    def bias(self) -> Tensor | None:
        """The bias [E, H] of the down projections."""
        return self.b2

    @property
    def _weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.w13, self.b13, self.w2, self.b2

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """[T, H] to [T, H], the weighted sum of the chosen experts' outputs. `input_ids`, int [T],
        are the token ids for a router by token id.
        """
        return self._moe(hidden, *self._route(hidden, input_ids), *self._weights, *self._clamp)


class Mxfp4Moe:
    """`ClampedMoe` with expert weights kept as the checkpoint's MXFP4 codes."""

    __slots__ = ("_clamp", "_moe", "_route", "weights")

    def __init__(self, build: Scope, moe: MoeConfig, spec: ExpertSpec, route: Routing) -> None:
        hidden, size, count = build.config.hidden_size, moe.intermediate_size, moe.num_experts
        each, choices = build.at("experts"), moe.experts_per_token
        self._route = route
        self.weights = (
            *_codes(each, "gate_up_proj", count, 2 * size, hidden),
            *_codes(each, "down_proj", count, hidden, size),
        )
        self._clamp = spec.alpha, spec.limit
        given = build.rows(hidden), build.rows(choices), build.indices(choices), *self.weights, *self._clamp
        self._moe = build.kernel(KernelTable.mxfp4_moe, *given)
        if self._moe is None:
            raise ConfigError("no kernel takes these experts in 4 bits", remedy="use a checkpoint with plain experts")

    @property
    def bias(self) -> Tensor | None:
        """The bias [E, H] of the down projections."""
        return self.weights[-1]

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """[T, H] to [T, H], the weighted sum of the chosen experts' outputs. `input_ids`, int [T],
        are the token ids for a router by token id.
        """
        assert self._moe is not None
        return self._moe(hidden, *self._route(hidden, input_ids), *self.weights, *self._clamp)


def _codes(build: Scope, name: str, experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Declare a projection of all experts in the kernel table's layout: codes uint8 [experts,
    outputs, inputs / GROUP, GROUP / 2], scales uint8 [experts, outputs, inputs / GROUP], and biases
    [experts, outputs]. Returns the three.
    """
    groups, uint8 = (experts, outputs, inputs // GROUP), torch.uint8
    blocks = build.parameter(f"{name}_blocks", *groups, GROUP // 2, dtype=uint8)
    return (
        blocks,
        build.parameter(f"{name}_scales", *groups, dtype=uint8),
        build.parameter(f"{name}_bias", experts, outputs),
    )


class Relu2Moe:
    """A router, and experts down(max(up(x), 0)^2). With `spec.latent`, rows are projected to this
    width before the experts, and back after their sum."""

    __slots__ = ("_moe", "_route", "fc1", "fc2", "w1", "w2")

    def __init__(self, build: Scope, moe: MoeConfig, spec: ExpertSpec, route: Routing) -> None:
        size, count, latent = moe.intermediate_size, moe.num_experts, spec.latent
        hidden, bias = build.config.hidden_size, build.config.mlp_bias
        width, each, choices = latent or hidden, build.at("experts"), moe.experts_per_token
        self._route = route
        self.fc1 = Linear(build, (("fc1_latent_proj", latent),), hidden, bias) if latent else None
        self.fc2 = Linear(build, (("fc2_latent_proj", hidden),), latent, bias) if latent else None
        self.w1 = each.expert_stacked("up_proj", count, (("up_proj.weight", size),), width)
        self.w2 = each.expert_stacked("down_proj", count, (("down_proj.weight", width),), size)
        given = build.rows(width), build.rows(choices), build.indices(choices), self.w1, self.w2
        self._moe = build.kernel(KernelTable.relu2_moe, *given)

    @property
    def bias(self) -> Tensor | None:
        """The bias [H] of `fc2_latent_proj`; None without one."""
        return None if self.fc2 is None else self.fc2.bias

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """[T, H] to [T, H], the weighted sum of the chosen experts' outputs. `input_ids`, int [T],
        are the token ids for a router by token id.
        """
        narrow = hidden if self.fc1 is None else self.fc1(hidden)
        mixed = self._moe(narrow, *self._route(hidden, input_ids), self.w1, self.w2)
        return mixed if self.fc2 is None else self.fc2(mixed)


def expert_weights(build: Scope, moe: MoeConfig, parts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Declare the weights of E experts and return them: gate over up [E, 2 * I, H], and down [E, H,
    I]. `parts` are the names of gate, up and down of each expert in `experts`, or two names of
    weights of all experts: gate over up, and down."""
    hidden, size, count = build.config.hidden_size, moe.intermediate_size, moe.num_experts
    if len(parts) == 2:
        both, down = parts
        gate_up = build.parameter(f"{both}.weight", count, 2 * size, hidden)
        return gate_up, build.parameter(f"{down}.weight", count, hidden, size)
    each, (first, second, down) = build.at("experts"), parts
    gate_up = ((f"{first}.weight", size), (f"{second}.weight", size))
    w13 = each.expert_stacked("gate_up_proj", count, gate_up, hidden)
    return w13, each.expert_stacked("down_proj", count, ((f"{down}.weight", hidden),), size)
