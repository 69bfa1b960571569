"""Checks of the tensors that the native kernels of small operations take, and their description in
kernel arguments."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore_cpu.native import TYPES

INDEX_BYTES: Mapping[torch.dtype, int] = MappingProxyType({torch.int32: 4, torch.int64: 8})

SERVED = (torch.float32, torch.bfloat16)
"""Element types that the native kernels compute in."""

Rows = tuple[int, int, int, int, int]
"""(number of rows, outer stride, inner rows per outer row, inner stride, row width); strides and
width in elements."""


def takes(*call: object) -> str:
    """Return why the native kernels refuse the call, empty if they take it: its first
    floating-point tensor must be float32 or bfloat16. Nothing else is checked."""
    dtype = next(arg.dtype for arg in call if isinstance(arg, Tensor) and arg.is_floating_point())
    return "" if dtype in SERVED else f"it computes in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"


def same_dtype(first: Tensor, *others: Tensor) -> bool:
    """Return whether all tensors have one dtype."""
    return all(other.dtype is first.dtype for other in others)


def type_of_norm(weight: Tensor, x: Tensor) -> int | None:
    """Return the kernels' number for the dtype of a norm's weight [N]; None unless the weight is
    contiguous and of x's dtype or float32, and that dtype is float32 or bfloat16."""
    fits = weight.stride() == (1,) and weight.dtype in (x.dtype, torch.float32)
    return TYPES.get(weight.dtype) if fits else None


def rows_of(x: Tensor) -> Rows | None:
    """Return where the rows along the last dimension of x are, as `Rows`; None for a scalar, and if
    two strides can not describe them. A contiguous tensor of any number of dimensions is described,
    and so is one of 2 or 3 dimensions without gaps within its rows."""
    shape, strides = x.shape, x.stride()
    if len(shape) == 2 and strides[1] == 1:
        return shape[0], strides[0], 1, 0, shape[1]
    if len(shape) == 3 and strides[2] == 1:
        return shape[0] * shape[1], strides[0], max(shape[1], 1), strides[1], shape[2]
    if not shape or not x.is_contiguous():
        return None
    width = shape[-1]
    return x.numel() // max(width, 1), width, 1, 0, width


def can_rotate(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> bool:
    """Return whether the rotary kernel takes the tensors: q and k [T, heads * D] of one dtype,
    float32 or bfloat16, with contiguous rows; contiguous int32 or int64 positions; a float32
    cos/sin cache with contiguous rows."""
    return (
        q.dtype in TYPES
        and k.dtype is q.dtype
        and q.stride()[1] == 1
        and k.stride()[1] == 1
        and positions.dtype in INDEX_BYTES
        and positions.stride() == (1,)
        and cos_sin_cache.dtype is torch.float32
        and cos_sin_cache.stride()[1] == 1
    )


def can_store(like: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> bool:
    """Return whether one kernel can store v [T, heads * D] or [T, heads, D], and keys of the dtype
    of `like`, in both caches [KV slots, heads, D]: v of that dtype, caches of one dtype and equal
    strides with contiguous heads, contiguous int32 or int64 locations. Dtypes are float32 or
    bfloat16."""
    strides, head_dim = k_cache.stride(), k_cache.shape[2]
    return (
        like.dtype in TYPES
        and v.dtype is like.dtype
        and v.stride()[1:] in ((1,), (head_dim, 1))
        and k_cache.dtype in TYPES
        and v_cache.dtype is k_cache.dtype
        and strides == v_cache.stride()
        and strides[1:] == (head_dim, 1)
        and out_cache_loc.dtype in INDEX_BYTES
        and out_cache_loc.stride() == (1,)
    )
