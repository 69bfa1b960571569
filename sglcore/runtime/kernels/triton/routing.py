"""Which experts a token goes to: softmax over all experts, then the largest, one row in registers."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglcore.runtime.kernels.reference import top_k_routing as reference_top_k_routing
from sglcore.runtime.kernels.triton.rounding import narrow
from sglcore.runtime.kernels.triton.tuning import Tuning, power_of_two, tiles


@triton.jit
def top_k_routing_kernel(
    logits,
    weights,
    ids,
    rows,
    stride,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Equal probabilities go by the lower id; ids are valid whatever a row contains. Floor: rows * EXPERTS elements read."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (expert < EXPERTS)[None, :]
    row = row.to(tl.int64)
    place = logits + row[:, None] * stride + expert[None, :]
    wide = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
    share = tl.exp(wide - tl.max(tl.where(inside, wide, -1e30), axis=1)[:, None])
    total = tl.sum(tl.where(inside, share, 0.0), axis=1)
    share = share / total[:, None]
    share = tl.where(share >= 0, share, 0.0)
    # The bits of floats that are not negative order as the floats do; behind them the ids, the lowest largest.
    order = share.to(tl.int32, bitcast=True).to(tl.int64) * BLOCK + (BLOCK - 1 - expert)[None, :]
    order = tl.where((expert < EXPERTS)[None, :], order, -1)
    chosen = tl.zeros([ROWS], tl.float32)
    if NORMALIZE:
        left = order
        for _ in tl.static_range(CHOICES):
            best = tl.max(left, axis=1)
            chosen += (best // BLOCK).to(tl.int32).to(tl.float32, bitcast=True)
            left = tl.where(left == best[:, None], -1, left)
    else:
        chosen += 1.0
    for choice in tl.static_range(CHOICES):
        best = tl.max(order, axis=1)
        weight = (best // BLOCK).to(tl.int32).to(tl.float32, bitcast=True) / chosen
        tl.store(weights + row * CHOICES + choice, narrow(weight, weights.dtype.element_ty), mask=row < rows)
        tl.store(ids + row * CHOICES + choice, BLOCK - 1 - best % BLOCK, mask=row < rows)
        order = tl.where(order == best[:, None], -1, order)


def top_k_routing(logits: Tensor, k: int, normalize: bool, tuning: Tuning = Tuning()) -> tuple[Tensor, Tensor]:
    """The table's `top_k_routing`. A compiler gets the reference, which it fuses."""
    if torch.compiler.is_compiling():
        return reference_top_k_routing(logits, k, normalize)
    rows, experts = logits.shape
    weights = torch.empty(rows, k, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if not rows:
        return weights, ids
    block = power_of_two(experts)
    held = tuning.rows(block, rows)
    top_k_routing_kernel[(tiles(rows, held),)](
        logits,
        weights,
        ids,
        rows,
        logits.stride(0),
        EXPERTS=experts,
        BLOCK=block,
        CHOICES=k,
        NORMALIZE=normalize,
        ROWS=held,
        **tuning.options(tuning.top_k_routing),
    )
    return weights, ids
