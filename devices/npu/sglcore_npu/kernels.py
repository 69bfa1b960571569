"""The NPU's kernel table: the vendor's fused operators if torch_npu registers them, otherwise the
reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sglcore.runtime.kernels.table import KernelTable, Limited, Trial, takes_one_dtype
from sglcore_npu import sparse

FRACTAL_NZ = 29
"""The blocked weight layout, which the matrix units read without rearranging."""
BLOCK = 16
"""16-bit elements along both sides of a block."""
STORED = (torch.float16, torch.bfloat16)
"""KV cache types that the store operator supports on an A2 or A3."""
LARGE = 1 << 20
"""From this number of elements, a weight is streamed from memory, and the layout pays."""

MOST_ROWS = 1024
"""Rows of a table in the call that tries an operator."""
WIDEST_HEAD, MOST_HEADS = 896, 1000
"""Exclusive limits of the rotary operator: head size and number of heads."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implements `KernelTable.rms_norm` with npu_rms_norm: x [..., N], weight [N] of x's dtype ->
    [..., N]."""
    return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implements `KernelTable.add_rms_norm` with npu_add_rms_norm: return the norm of x + residual
    [T, H], and the sum, in new tensors."""
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
    return normed, total


def silu_and_mul(x: Tensor) -> Tensor:
    """Implements `KernelTable.silu_and_mul` with npu_swiglu: x [T, 2 * I] -> [T, I]."""
    return torch.ops.npu.npu_swiglu(x, -1)


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
    """Implements `KernelTable.store_kv` with one operator: row t of key and value [T, kv_heads, D]
    goes to KV slot out_cache_loc[t] of both caches, cast to their dtype. The operator expects
    pages; with pages of one token its slots are our KV slots."""
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
    """Return why `store_kv` refuses the call, empty if it takes it: the KV cache must be float16 or
    bfloat16 (see `Limited`)."""
    if k_cache.dtype in STORED:
        return ""
    return f"it stores float16 and bfloat16, not {str(k_cache.dtype).removeprefix('torch.')}"


def takes_nz(weight: Tensor) -> bool:
    """Return whether a matrix gets the blocked layout: it has 16-bit elements, at least LARGE of
    them, and both sides are whole blocks."""
    aligned = all(size % BLOCK == 0 for size in weight.shape)
    return weight.dtype in (torch.float16, torch.bfloat16) and aligned and weight.numel() >= LARGE


def pack_linear(weight: Tensor) -> Tensor:
    """Implements `KernelTable.pack_linear`: return the weight [out, in] in the blocked layout if
    `takes_nz`, otherwise as it is; torch's linear reads both layouts."""
    return torch.ops.npu.npu_format_cast(weight, FRACTAL_NZ) if takes_nz(weight) else weight


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Implements `KernelTable.rotary` for heads that are rotated whole: return rotated q [T, heads
    * D] and k [T, kv_heads * D] in new tensors, by the vendor's x * cos + swapped(x) * sin."""
    tokens = q.shape[0]
    if not tokens:
        return torch.empty_like(q), torch.empty_like(k)
    rows = cos_sin_cache.index_select(0, positions).to(q.dtype).view(1, tokens, 1, head_dim)
    cos, sin = (torch.cat((half, half), dim=-1) for half in rows.chunk(2, dim=-1))
    return _rotated(q, cos, sin, head_dim), _rotated(k, cos, sin, head_dim)


def takes_rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> str:
    """Return why `rotary` refuses these heads, empty if it takes them (see `Limited`). Limits by
    the vendor's page on npu_rotary_mul: less than 896 elements per head, less than 1000 heads, and
    no partial rotation."""
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
"""For each operator of torch_npu, a function for the kernel table; the function's name is the
entry's name."""


def kernels() -> KernelTable:
    """Implements `DevicePackage.kernels`: return the reference with torch_npu's operators before
    it. Where torch_npu does not register an operator, or the operator fails for a small call, the
    entry stays the reference, with a reason for the ledger; nothing is raised."""
    table = KernelTable()
    for operator, function in OPERATORS.items():
        table = table.offering(operator, function.function.__name__, partial(_offered, operator, function))
    return table


def _offered(operator: str, given: Limited) -> Limited:
    """Return the function with its limits and a trial, which runs before it is chosen. Raises
    ImportError if the operator is not registered.

    The conversion of weights is tried here instead, because no layer chooses it; an error of the
    operator is raised.
    """
    if not offers(operator):
        raise ImportError("this torch_npu does not register it; install a newer one")
    if given.function is pack_linear:
        torch.ops.npu.npu_format_cast(torch.zeros(BLOCK, BLOCK, dtype=torch.float16, device="npu"), FRACTAL_NZ).cpu()
        return given
    return replace(given, trial=Trial(partial(_try, given.function)))


def _try(function: Callable[..., Any], *call: Any) -> Any:
    """Call a function with zeros on the NPU, of the dtypes and sizes of `call` but at most
    `MOST_ROWS` rows; wait for the device, which tells only then that an operator failed, and return
    the result. It raises what the operator raises."""
    found = function(*(_zeros(arg) if isinstance(arg, Tensor) else arg for arg in call))
    torch.accelerator.synchronize()
    return found


def _zeros(arg: Tensor) -> Tensor:
    rows = min(arg.shape[0], MOST_ROWS) if arg.dim() > 1 else arg.shape[0]
    return torch.zeros(rows, *arg.shape[1:], dtype=arg.dtype, device="npu")


def offers(operator: str) -> bool:
    """Return whether torch_npu registered the operator of this name."""
    return hasattr(torch.ops.npu, operator)  # foreign: operators are attributes that exist once they are registered
