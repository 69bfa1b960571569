"""Experts of transformers' classes: by the engine's kernel where they are of its form, else one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from sglcore.layers.build import Build
from sglcore.runtime.kernels.table import KernelTable

EXPERTS = "sglcore_experts"
"""The name under which transformers finds them."""


def serve_experts(model: PreTrainedModel) -> None:
    """Experts of the model are computed here."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
    model.set_experts_implementation(EXPERTS)


def choose_experts(model: PreTrainedModel, build: Build) -> None:
    """Give every module with stacked experts the kernel that computes them, once its weights have their places."""
    for module in model.modules():
        if has_experts(module):
            module.sglcore_moe = _kernel(module, build)  # pyright: ignore[reportArgumentType]


def has_experts(module: nn.Module) -> bool:
    """Only such modules were given the word by transformers."""
    return "is_concatenated" in vars(module)


def _kernel(module: Any, build: Build) -> Any:
    """The table's entry, for gate and up side by side, SiLU and nothing else; None for any other form."""
    is_plain = module.has_gate and module.is_concatenated and not module.is_transposed and not module.has_bias
    gate = type(module)._apply_gate is _default_apply_gate
    if not (is_plain and gate and not module.has_post_expert_norm and type(module.act_fn) is type(ACT2FN["silu"])):
        return None
    call = build.rows(module.down_proj.shape[1]), build.rows(2), build.indices(2)
    return build.kernel(KernelTable.moe, *call, module.gate_up_proj, module.down_proj)


def _experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """hidden [T, H], ids int [T, K] and weights [T, K] of the chosen experts, to [T, H]."""
    if hidden.device.type == "meta":
        return hidden
    if module.sglcore_moe is not None:
        return module.sglcore_moe(hidden, weights.to(hidden.dtype), ids, module.gate_up_proj, module.down_proj)
    total = torch.zeros_like(hidden)
    for expert in range(module.down_proj.shape[0]):
        chosen = ids == expert
        weight = weights.masked_fill(~chosen, 0).sum(dim=-1, keepdim=True)
        rows = (_one(module, expert, hidden) * weight).to(hidden.dtype)
        total = total + rows.masked_fill(~chosen.any(dim=-1, keepdim=True), 0)
    return total


def _one(module: Any, expert: int, hidden: Tensor) -> Tensor:
    """All rows through one expert: no shape depends on the routing."""
    inner = _project(module, "gate_up_proj" if module.has_gate else "up_proj", expert, hidden)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = _project(module, "down_proj", expert, inner)
    return module.post_expert_norm(out) if module.has_post_expert_norm else out


def _project(module: Any, name: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return linear(x, weight.t() if module.is_transposed else weight, bias)
