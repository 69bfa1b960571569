"""Experts of classes that ask on the host which of them were chosen: computed here, by shapes that
do not depend on it.

Known by the names of their weights: stacked experts of which some may be missing, whose rows pass
as they are; experts in flat weights; and products of rows in the order of their experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from sglcore.models.transformers_experts import has_experts
from sglcore.models.transformers_states import names_by_kind

One = Callable[[Any, int, Tensor], Tensor]
"""Of a module and an expert's number, rows [T, H] to [T, H]."""


def take_routed(model: nn.Module) -> None:
    """Every such module of a model computes here."""
    modules = list(model.modules())
    asks = {kind: _asks(kind) for kind in set(map(type, modules))}
    sorted_ones = [each for each in modules if "expert_size" in asks[type(each)] and _names(each) == {"weight"}]
    for module in sorted_ones:
        module.forward = partial(_by_order, module)
    names = names_by_kind(modules) if sorted_ones else {}
    for module in modules:
        form = _FORMS.get(frozenset(_names(module))) if "top_k_index" in asks[type(module)] else None
        if form is not None and not has_experts(module):
            module.forward = partial(_routed, module, *form)
        if "tolist" in names.get(type(module), ()):
            module.__class__ = type(type(module).__name__, (CountsOnDevice, type(module)), {})


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def _asks(kind: type[nn.Module]) -> tuple[str, ...]:
    """The arguments of its forward."""
    forward = kind.forward
    return tuple(inspect.signature(forward).parameters) if isinstance(forward, FunctionType) else ()


def _stacked(module: Any, expert: int, x: Tensor) -> Tensor:
    gate, up = linear(x, module.gate_up_proj[expert]).chunk(2, dim=-1)
    return linear(module.act_fn(gate) * up, module.down_proj[expert])


def _flat(module: Any, expert: int, x: Tensor) -> Tensor:
    mlp = module.mlp
    w1, v1, w2 = (each.view(module.num_experts, -1, x.shape[-1])[expert] for each in (mlp.w1, mlp.v1, mlp.w2))
    return mlp(x, w1, v1, w2)


_FORMS: Mapping[frozenset[str], tuple[One, Callable[[Any], int]]] = MappingProxyType(
    {
        frozenset({"gate_up_proj", "down_proj"}): (_stacked, lambda module: module.down_proj.shape[0]),
        frozenset({"mlp.w1", "mlp.v1", "mlp.w2"}): (_flat, lambda module: module.num_experts),
    }
)
"""By the names of their weights: one expert, and how many there are."""


def _routed(
    module: nn.Module, one: One, count: Callable[[Any], int], hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The weighted sum [.., H] of the experts `top_k_index` [T, K] of hidden [.., H]. Of experts
    that are not there, rows pass."""
    if hidden.device.type == "meta":
        return torch.empty_like(hidden)
    x, experts = hidden.reshape(-1, hidden.shape[-1]), count(module)
    passed = top_k_weights.masked_fill(top_k_index < experts, 0).sum(dim=-1, keepdim=True)
    total = x * passed.to(x.dtype)
    for expert in range(experts):
        chosen = top_k_index == expert
        weight = top_k_weights.masked_fill(~chosen, 0).sum(dim=-1, keepdim=True)
        rows = (one(module, expert, x) * weight).to(x.dtype)
        total = total + rows.masked_fill(~chosen.any(dim=-1, keepdim=True), 0)
    return total.view(hidden.shape)


def _by_order(module: Any, inputs: Tensor, expert_size: Tensor) -> Tensor:
    """Rows [N, in], the first `expert_size[0]` of which are the first expert's and so on, to [N,
    out]."""
    expert = (torch.arange(len(inputs), device=inputs.device)[:, None] >= expert_size.cumsum(0)).sum(
        dim=1, keepdim=True
    )
    total = inputs.new_zeros(len(inputs), module.weight.shape[1])
    for number, weight in enumerate(module.weight):
        total = total + linear(inputs, weight).masked_fill(expert != number, 0)
    return total


class CountsOnDevice(nn.Module):
    """A module whose counts stay tensors: mixed into its class."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """As its class."""
        with _NoLists():
            return super().__call__(*args, **named)


class _NoLists(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.tolist else func(*args, **(kwargs or {}))
