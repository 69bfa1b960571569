"""The NPU's kernel table: the vendor's fused operators where torch_npu registers them, the
reference elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore.runtime.kernels.table import KernelTable, Limited, takes_one_dtype
from sglcore_npu import sparse

FRACTAL_NZ = 29
"""The layout of blocks in which the matrix units read a weight without rearranging it."""
BLOCK = 16
"""Elements of 16 bits along both sides of a block."""
STORED = (torch.float16, torch.bfloat16)
"""Types of cells that the operator stores on an A2 or A3."""
LARGE = 1 << 20
"""Elements from which a weight is streamed rather than kept close: there the layout pays."""

WIDEST_HEAD, MOST_HEADS = 896, 1000
"""Bounds of the rotary operator, which it does not reach."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One operator."""
    return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One operator for the sum and its norm."""
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
    return normed, total


def silu_and_mul(x: Tensor) -> Tensor:
    """One operator."""
    return torch.ops.npu.npu_swiglu(x, -1)


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
    """One operator for both caches; it takes pages, and a page of one cell makes its slots the
    cells."""
    if not key.shape[0]:
        return
    torch.ops.npu.npu_scatter_pa_kv_cache(
        key.to(k_cache.dtype).contiguous(),
        value.to(v_cache.dtype).contiguous(),
        k_cache.unsqueeze(1),
        v_cache.unsqueeze(1),
        out_cache_loc,
        cache_mode="Norm",
    )


def takes_store(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> str:
    """Cells of 16 bits."""
    if k_cache.dtype in STORED:
        return ""
    return f"it stores cells of float16 and bfloat16, not of {str(k_cache.dtype).removeprefix('torch.')}"


def takes_nz(weight: Tensor) -> bool:
    """Whether a matrix is large, has 16-bit elements, and both its sides are whole blocks."""
    aligned = all(size % BLOCK == 0 for size in weight.shape)
    return weight.dtype in (torch.float16, torch.bfloat16) and aligned and weight.numel() >= LARGE


def pack_linear(weight: Tensor) -> Tensor:
    """Laid out in blocks where that pays; torch's own linear reads both layouts."""
    return torch.ops.npu.npu_format_cast(weight, FRACTAL_NZ) if takes_nz(weight) else weight


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The vendor's x * cos + swapped(x) * sin."""
    tokens = q.shape[0]
    if not tokens:
        return torch.empty_like(q), torch.empty_like(k)
    rows = cos_sin_cache.index_select(0, positions).to(q.dtype).view(1, tokens, 1, head_dim)
    cos, sin = (torch.cat((half, half), dim=-1) for half in rows.chunk(2, dim=-1))
    return _rotated(q, cos, sin, head_dim), _rotated(k, cos, sin, head_dim)


def takes_rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> str:
    """The operator's limits, by the vendor's page on npu_rotary_mul: less than 896 elements a head
    and less than 1000 heads; and it rotates heads whole."""
    rotated, heads = cos_sin_cache.shape[1], max(q.shape[1], k.shape[1]) // head_dim
    if rotated != head_dim:
        return f"{rotated} of {head_dim} elements of a head are rotated"
    if head_dim >= WIDEST_HEAD or heads >= MOST_HEADS:
        return f"{heads} heads of {head_dim}; it takes less than {MOST_HEADS} of less than {WIDEST_HEAD}"
    return ""


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    tokens, width = x.shape
    heads = x.view(1, tokens, width // head_dim, head_dim)
    return torch.ops.npu.npu_rotary_mul(heads, cos, sin, "half").view(tokens, width)


OPERATORS: Mapping[str, Limited] = MappingProxyType(
    {
        "npu_rms_norm": Limited(rms_norm, takes_one_dtype),
        "npu_add_rms_norm": Limited(add_rms_norm, takes_one_dtype),
        "npu_swiglu": Limited(silu_and_mul),
        "npu_rotary_mul": Limited(rotary, takes_rotary),
        "npu_scatter_pa_kv_cache": Limited(store_kv, takes_store),
        "npu_format_cast": Limited(pack_linear),
        **sparse.OPERATORS,
    }
)
"""The entry of the table that an operator serves, by the name of its function."""


def kernels() -> KernelTable:
    """The table this device runs; an operator that this torch_npu does not register leaves its
    entry to the reference, and the ledger says so."""
    offered = {each.function.__name__: each for operator, each in OPERATORS.items() if offers(operator)}
    refused = (
        f"{operator} refused for {each.function.__name__}: this torch_npu does not register it; install a newer one"
        for operator, each in OPERATORS.items()
        if each.function.__name__ not in offered
    )
    return KernelTable().replace(**offered).refusing(*refused)


def offers(operator: str) -> bool:
    """torch_npu registered this operator."""
    return hasattr(torch.ops.npu, operator)  # foreign: operators are attributes that exist once they are registered
