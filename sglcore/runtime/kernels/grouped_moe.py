"""MoE by grouped matrix products.

Only the chosen experts are computed, and no shape depends on the routing. For a device with a
grouped product in torch: `KernelTable().replace(moe=grouped_moe)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from sglcore.runtime.kernels.reference_kernels import clamped_swiglu, relu2, silu_and_mul


def grouped_moe(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Implement `KernelTable.moe` by `torch.nn.functional.grouped_mm`: hidden [T, H], weights and
    ids [T, K] (-1: no expert), w13 [E, 2 I, H], w2 [E, H, I] to [T, H].

    Rows are copied for each choice and sorted by expert; the results of a token are summed at once,
    in a wider dtype. Rows of H and of I elements must be multiples of 16 bytes, and bfloat16 if a
    compiler traces this; torch raises `RuntimeError` otherwise.
    """
    return _grouped(hidden, weights, ids, w13, w2, lambda part, experts: silu_and_mul(part), None)


def grouped_relu2_moe(hidden: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Implement `KernelTable.relu2_moe` as `grouped_moe` does, with the same conditions: w1
    [E, I, H], squared ReLU, w2 [E, H, I], without a gate. Return [T, H].
    """
    return _grouped(hidden, weights, ids, w1, w2, lambda part, experts: relu2(part), None)


def grouped_clamped_moe(
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    b13: Tensor,
    w2: Tensor,
    b2: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """Implement `KernelTable.clamped_moe` as `grouped_moe` does, with the same conditions: experts
    have biases b13 [E, 2 I] and b2 [E, H] and the activation `clamped_swiglu`, for which gate and
    up rows of w13 are interleaved.
    """

    def activate(part: Tensor, experts: Tensor) -> Tensor:
        return clamped_swiglu(part + b13[experts], alpha, limit)

    return _grouped(hidden, weights, ids, w13, w2, activate, b2)


def _grouped(
    hidden: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    activate: Callable[[Tensor, Tensor], Tensor],
    b2: Tensor | None,
) -> Tensor:
    """Compute an MoE [T, H] by two grouped products; tensors as in `grouped_moe`.

    `activate(part, experts)` gets the output of the first product and the expert of each of its
    rows; `b2` None: the second product has no bias.
    """
    tokens, choices = ids.shape
    experts, rows = w13.shape[0], tokens * choices
    # Rows without an expert sort after the last group; the products leave undefined values there,
    # masked later.
    chosen = torch.where(ids < 0, experts, ids).view(rows)
    by_expert, order = torch.sort(chosen, stable=True)
    order, groups = order.to(ids.dtype), torch.arange(experts, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(by_expert, groups, right=True, out_int32=True)
    those = by_expert.clamp(max=experts - 1)
    part = grouped_mm(hidden[order // choices], w13.transpose(1, 2), offs=ends)
    part = grouped_mm(activate(part, those), w2.transpose(1, 2), offs=ends)
    part = part if b2 is None else part + b2[those]
    part = (part * weights.view(rows, 1)[order]).masked_fill((by_expert == experts).unsqueeze(1), 0)
    back = torch.empty_like(part).index_put_((order,), part)
    return back.view(tokens, choices, hidden.shape[1]).sum(dim=1)
