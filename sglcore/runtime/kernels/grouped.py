"""Experts by grouped matrix products: only the chosen ones are computed, and still no shape depends on the routing.

For a device whose torch has a grouped product: `KernelTable().replace(moe=grouped_moe)`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from sglcore.runtime.kernels.reference import silu_and_mul


def grouped_moe(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The table's `moe`. Rows are copied once for each choice and sorted by expert; the sum over choices is wide.

    Rows of H and of I elements must be multiples of 16 bytes, and in bfloat16 if a compiler is to trace it; torch
    raises `RuntimeError` otherwise.
    """
    tokens, choices = ids.shape
    experts, rows = w13.shape[0], tokens * choices
    # Rows without an expert sort behind the last group; what the products leave there is undefined until masked.
    chosen = torch.where(ids < 0, experts, ids).view(rows)
    by_expert, order = torch.sort(chosen, stable=True)
    order, groups = order.to(ids.dtype), torch.arange(experts, dtype=ids.dtype, device=ids.device)
    ends = torch.searchsorted(by_expert, groups, right=True, out_int32=True)
    part = grouped_mm(hidden[order // choices], w13.transpose(1, 2), offs=ends)
    part = grouped_mm(silu_and_mul(part), w2.transpose(1, 2), offs=ends)
    part = (part * weights.view(rows, 1)[order]).masked_fill((by_expert == experts).unsqueeze(1), 0)
    back = torch.empty_like(part).index_put_((order,), part)
    return back.view(tokens, choices, hidden.shape[1]).sum(dim=1)
