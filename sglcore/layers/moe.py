"""Mixture of experts: a router chooses experts for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.checkpoint.model_config import MoeConfig
from sglcore.checkpoint.moe_spec import ExpertSpec, Form, RoutingSpec
from sglcore.checkpoint.parallel.expert_parts import GROUP
from sglcore.checkpoint.quantization_config import has_mxfp4_experts
from sglcore.core.errors import ConfigError
from sglcore.layers.build_scope import Scope
from sglcore.layers.expert_routing import make_routing
from sglcore.layers.linear import Linear
from sglcore.runtime.kernels.entry import Entry
from sglcore.runtime.kernels.table import KernelTable


@dataclass(frozen=True, slots=True)
class Kept:
    """The experts of a layer as their kernel takes them."""

    entry: Entry[Any]
    """The kernel's entry in the table: called with rows, the weights and numbers of their experts,
    `weights` and `bounds`."""
    weights: tuple[Tensor, ...]
    """The declared weights, in the kernel's order."""
    bounds: tuple[float, ...] = ()
    """The numbers of a clamped activation."""
    bias: Tensor | None = None
    """The bias [E, H] that is added after the down projections. None: there is none."""


class Experts:
    """A router and experts, all on this device. With `spec.latent`, rows are projected to this
    width before the experts, and back after their sum."""

    __slots__ = ("_bounds", "_moe", "_route", "bias", "fc1", "fc2", "weights")

    def __init__(self, build: Scope, moe: MoeConfig, spec: ExpertSpec, routing: RoutingSpec) -> None:
        hidden, latent, has_bias = build.config.hidden_size, spec.latent, build.config.mlp_bias
        self._route = make_routing(build, routing, moe)
        self.fc1 = Linear(build, (("fc1_latent_proj", latent),), hidden, has_bias) if latent else None
        self.fc2 = Linear(build, (("fc2_latent_proj", hidden),), latent, has_bias) if latent else None
        kept = FORMS[spec.form](build, moe, spec)
        self.weights, self._bounds = kept.weights, kept.bounds
        self.bias = kept.bias if self.fc2 is None else self.fc2.bias
        """The bias added last, for each expert [E, H] or after their sum [H]. None: there is
        none."""
        choices = build.rows(moe.experts_per_token), build.indices(moe.experts_per_token)
        self._moe = build.kernel(kept.entry, build.rows(latent or hidden), *choices, *kept.weights, *kept.bounds)
        if self._moe is None:
            raise ConfigError("no kernel takes these experts in 4 bits", remedy="use a checkpoint with plain experts")

    def __call__(self, hidden: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """[T, H] to [T, H], the weighted sum of the chosen experts' outputs. `input_ids`, int [T],
        are the token ids for a router by token id.
        """
        narrow = hidden if self.fc1 is None else self.fc1(hidden)
        mixed = self._moe(narrow, *self._route(hidden, input_ids), *self.weights, *self._bounds)
        return mixed if self.fc2 is None else self.fc2(mixed)


def reads_mxfp4(build: Scope) -> bool:
    """Return whether the checkpoint's experts are MXFP4 codes, and the kernels read these."""
    return build.kernels.mxfp4_moe is not None and has_mxfp4_experts(build.config.raw)


def _gated(build: Scope, moe: MoeConfig, spec: ExpertSpec) -> Kept:
    return Kept(KernelTable.moe, expert_weights(build, moe, spec.parts))


def _limited(build: Scope, moe: MoeConfig, spec: ExpertSpec) -> Kept:
    return Kept(KernelTable.limited_moe, expert_weights(build, moe, spec.parts), (spec.limit,))


def _clamped(build: Scope, moe: MoeConfig, spec: ExpertSpec) -> Kept:
    """MXFP4 codes if the checkpoint has these and the kernels read them."""
    hidden, size, count = build.config.hidden_size, moe.intermediate_size, moe.num_experts
    each, bounds = build.at("experts"), (spec.alpha, spec.limit)
    if reads_mxfp4(build):
        up, down = _codes(each, "gate_up_proj", count, 2 * size, hidden), _codes(each, "down_proj", count, hidden, size)
        return Kept(KernelTable.mxfp4_moe, (*up, *down), bounds, down[-1])
    w13 = each.turned("gate_up_proj", count, 2 * size, hidden)
    b13 = each.parameter("gate_up_proj_bias", count, 2 * size)
    w2 = each.turned("down_proj", count, hidden, size)
    b2 = each.parameter("down_proj_bias", count, hidden)
    return Kept(KernelTable.clamped_moe, (w13, b13, w2, b2), bounds, b2)


def _relu2(build: Scope, moe: MoeConfig, spec: ExpertSpec) -> Kept:
    width, each, size = spec.latent or build.config.hidden_size, build.at("experts"), moe.intermediate_size
    w1 = each.expert_stacked("up_proj", moe.num_experts, (("up_proj.weight", size),), width)
    w2 = each.expert_stacked("down_proj", moe.num_experts, (("down_proj.weight", width),), size)
    return Kept(KernelTable.relu2_moe, (w1, w2))


FORMS: Mapping[Form, Callable[[Scope, MoeConfig, ExpertSpec], Kept]] = MappingProxyType(
    {"gated": _gated, "limited": _limited, "clamped": _clamped, "relu2": _relu2}
)
"""Declares the weights of the experts of each form, in the scope of their block."""


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
