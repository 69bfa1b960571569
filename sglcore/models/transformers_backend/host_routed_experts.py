"""Experts of classes that read the routing on the host: computed here with shapes that do not
depend on the routing.

Classes are recognised by the names of their weights: stacked experts, perhaps not for all indices
(rows of missing experts pass unchanged); experts in flat weights; and products of rows sorted by
expert.
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

from sglcore.models.transformers_backend.moe_adapter import has_experts
from sglcore.models.transformers_backend.stateful_layers import names_by_kind

One = Callable[[Any, int, Tensor], Tensor]
"""(module, expert's number, rows [T, H]) to [T, H]."""


def take_routed(model: nn.Module) -> None:
    """Replace, in place, the forward of each module of the model that reads the routing on the
    host."""
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
    """Return the argument names of a class's forward, `self` included; empty if it is not a Python
    function.
    """
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
"""By weight names: the function for one expert, and the number of experts."""


def _routed(
    module: nn.Module, one: One, count: Callable[[Any], int], hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum [.., H] of the experts `top_k_index` [T, K] for hidden [.., H]. `one`
    computes one expert, `count` returns the module's number of experts. For an index past the last
    expert, the row itself counts as the expert's output."""
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
    """Rows [N, in] sorted by expert, with `expert_size[i]` rows for expert i, to [N, out]."""
    expert = (torch.arange(len(inputs), device=inputs.device)[:, None] >= expert_size.cumsum(0)).sum(
        dim=1, keepdim=True
    )
    total = inputs.new_zeros(len(inputs), module.weight.shape[1])
    for number, weight in enumerate(module.weight):
        total = total + linear(inputs, weight).masked_fill(expert != number, 0)
    return total


class CountsOnDevice(nn.Module):
    """Mixed into the class of a module that calls `tolist` on its counts: these stay tensors on the
    device."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the class's forward, in which `tolist` returns the tensor."""
        with _NoLists():
            return super().__call__(*args, **named)


class _NoLists(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.tolist else func(*args, **(kwargs or {}))
