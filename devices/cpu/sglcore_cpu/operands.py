"""Which tensors the native kernels of small operations take, and how their arguments describe
them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from sglcore_cpu.native import TYPES

INDEX_BYTES: Mapping[torch.dtype, int] = MappingProxyType({torch.int32: 4, torch.int64: 8})

Rows = tuple[int, int, int, int, int]
"""Number of rows; elements from one outer row to the next; inner rows of each; elements between
those; row width."""


def same_dtype(first: Tensor, *others: Tensor) -> bool:
    """All of one dtype."""
    return all(other.dtype is first.dtype for other in others)


def type_of_norm(weight: Tensor, x: Tensor) -> int | None:
    """Of the weight of a norm of x: x's, or float32's; None for others."""
    fits = weight.stride() == (1,) and weight.dtype in (x.dtype, torch.float32)
    return TYPES.get(weight.dtype) if fits else None


def rows_of(x: Tensor) -> Rows | None:
    """The rows of x, or None if one pair of strides can not say where they are."""
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
    """q and k [T, heads * D] are of one dtype that the kernels compute in, rows without gaps in
    them."""
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
    """v [T, heads * D] or [T, heads, D] can go to cells of both caches in one pass."""
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
