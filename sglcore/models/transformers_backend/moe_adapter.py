"""Experts of transformers' classes: by the engine's kernel if their computation matches one, else
one expert after another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from sglcore.layers.torch_layers import Build
from sglcore.models.transformers_backend.module_probes import LARGE, is_same, only, tried
from sglcore.runtime.kernels import reference_kernels
from sglcore.runtime.kernels.table import KernelTable

EXPERTS = "sglcore_experts"
"""The name under which transformers finds this implementation of experts."""

Moe: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [T, H], weights [T, K], experts [T, K]) to [T, H]."""


def serve_experts(model: PreTrainedModel) -> None:
    """Make transformers call `_experts` for the model's stacked experts."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
    model.set_experts_implementation(EXPERTS)


def choose_experts(model: PreTrainedModel, build: Build) -> None:
    """Set `sglcore_moe`, the kernel or None, of every module with stacked experts, once its weights
    are placed.
    """
    for module in model.modules():
        if has_experts(module):
            module.sglcore_moe = _kernel(module, build)  # pyright: ignore[reportArgumentType]


def has_experts(module: nn.Module) -> bool:
    """Whether a module has stacked experts: only on such modules transformers sets the attribute
    `is_concatenated`."""
    return "is_concatenated" in vars(module)


def turned_weights(model: nn.Module) -> set[int]:
    """Return the `id()` of each stacked weight that a class stores as [E, in, out]; kernels take it
    as [E, out, in]."""
    found: set[int] = set()
    for module in model.modules():
        if has_experts(module) and vars(module)["is_transposed"]:
            found |= {id(each) for each in module._parameters.values() if each is not None and each.dim() == 3}
    return found


def _kernel(module: Any, build: Build) -> Moe | None:
    """Return a function (hidden, weights, experts) that runs the table's kernel, for gated experts
    that compute the same, with gate and up in one weight; None for any other experts."""
    if not module.has_gate or module.has_post_expert_norm:
        return None
    weights = module.gate_up_proj, module.down_proj
    w13, w2 = (each.transpose(1, 2) for each in weights) if module.is_transposed else weights
    call = build.rows(w2.shape[1]), build.rows(2), build.indices(2)
    if not module.has_bias and _gates(module, reference_kernels.silu_and_mul, build.dtype):
        moe = build.kernel(KernelTable.moe, *call, w13, w2)
        return lambda hidden, chosen, ids: moe(hidden, chosen, ids, w13, w2)
    numbers = sorted({each for each in vars(module).values() if isinstance(each, float)})
    pairs = product(numbers, repeat=2) if module.has_bias else ()
    clamp = only(pair for pair in pairs if _gates(module, partial(_clamped, *pair), build.dtype))
    if clamp is None:
        return None
    given = w13, module.gate_up_proj_bias, w2, module.down_proj_bias, *clamp
    clamped_moe = build.kernel(KernelTable.clamped_moe, *call, *given)
    return lambda hidden, chosen, ids: clamped_moe(hidden, chosen, ids, *given)


def _clamped(alpha: float, limit: float, gate_up: Tensor) -> Tensor:
    return reference_kernels.clamped_swiglu(gate_up, alpha, limit)


def _gates(module: Any, wanted: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """Whether the module's activation of gate and up [T, 2 * I] gives the same as `wanted`."""
    rows = torch.randn(5, 12, generator=torch.Generator().manual_seed(0)) * 4
    found = [(tried(module._apply_gate, x), wanted(x)) for x in (rows, LARGE * rows, rows.to(dtype))]
    return all(each is not None and is_same(each, other) for each, other in found)


def _experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts `ids` int [T, K] with `weights` [T, K] for `hidden` [T, H]; returns [T,
    H]."""
    if hidden.device.type == "meta":
        return torch.empty_like(hidden)
    if module.sglcore_moe is not None:
        return module.sglcore_moe(hidden, weights.to(hidden.dtype), ids.int())
    total = torch.zeros_like(hidden)
    for expert in range(module.down_proj.shape[0]):
        chosen = ids == expert
        weight = weights.masked_fill(~chosen, 0).sum(dim=-1, keepdim=True)
        rows = (_one(module, expert, hidden) * weight).to(hidden.dtype)
        total = total + rows.masked_fill(~chosen.any(dim=-1, keepdim=True), 0)
    return total


def _one(module: Any, expert: int, hidden: Tensor) -> Tensor:
    """Run all rows `hidden` [T, H] through one expert and return [T, H], so that no shape depends
    on the routing.
    """
    inner = _project(module, "gate_up_proj" if module.has_gate else "up_proj", expert, hidden)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = _project(module, "down_proj", expert, inner)
    return module.post_expert_norm(out) if module.has_post_expert_norm else out


def _project(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return linear(x, weight.t() if module.is_transposed else weight, bias)
