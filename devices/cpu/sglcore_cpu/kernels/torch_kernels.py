"""Torch's kernel table: the reference, with entries replaced by ones that need fewer torch calls.
It serves where the native kernels do not.

At batch 1 a call costs more than its arithmetic, so each entry here reduces the number of calls,
not of FLOPs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sglcore.runtime.kernels.grouped_moe import grouped_clamped_moe, grouped_moe, grouped_relu2_moe
from sglcore.runtime.kernels.reference_kernels import clamped_moe as reference_clamped_moe
from sglcore.runtime.kernels.reference_kernels import moe as reference_moe
from sglcore.runtime.kernels.reference_kernels import relu2_moe as reference_relu2_moe
from sglcore.runtime.kernels.reference_kernels import rotary as reference_rotary
from sglcore.runtime.kernels.table import KernelTable, Limited, takes_one_dtype

REMEMBERED = 1024
"""Most NumPy arrays of recent buffers that `CacheLocations` caches."""


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
    """Implement `KernelTable.store_kv` with two index copies: row t of key and value [T, kv_heads,
    D] goes to KV slot out_cache_loc[t] of both caches, cast to their dtype."""
    k_cache.index_copy_(0, out_cache_loc, key.to(k_cache.dtype))
    v_cache.index_copy_(0, out_cache_loc, value.to(v_cache.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement `KernelTable.rms_norm`: x [..., N], weight [N] -> [..., N]. One fused call: the
    layer norm of (x, -x), which has mean 0 and the mean square of x as variance."""
    size = x.shape[-1]
    normed = F.layer_norm(torch.cat((x, -x), dim=-1), (2 * size,), None, None, eps)
    return normed[..., :size] * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implement `KernelTable.add_rms_norm`: return the norm of x + residual [T, H], a new tensor,
    and `residual`, to which x is added in place."""
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Implement `KernelTable.linear`: x [T, in], weight [out, in], bias [out] or None -> [T, out].
    A weight that `pack_linear` packed is multiplied by oneDNN (mkldnn), a plain one by torch."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def pack_linear(weight: Tensor) -> Tensor:
    """Implement `KernelTable.pack_linear`: return a bfloat16 weight [out, in] in oneDNN's blocks
    for the processor's bfloat16 instructions, which is up to twice as fast at one token. A weight
    of another dtype, and any weight on a processor without them, is returned as it is."""
    if weight.dtype is not torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)


def moe(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Implement `KernelTable.moe`: hidden [T, H], weights and ids [T, K], w13 [E, 2 * I, H], w2 [E,
    H, I] -> [T, H], computing the chosen experts only. torch.compile supports grouped products in
    bfloat16 only, so during its tracing other dtypes get the reference."""
    if torch.compiler.is_compiling() and hidden.dtype is not torch.bfloat16:
        return reference_moe(hidden, weights, ids, w13, w2)
    return grouped_moe(hidden, weights, ids, w13, w2)


def clamped_moe(hidden: Tensor, *others: Any) -> Tensor:
    """Implement `KernelTable.clamped_moe` by grouped products, or by the reference where `moe` uses
    it; `others` are the entry's arguments after `hidden`. Returns [T, H]."""
    if torch.compiler.is_compiling() and hidden.dtype is not torch.bfloat16:
        return reference_clamped_moe(hidden, *others)
    return grouped_clamped_moe(hidden, *others)


def relu2_moe(hidden: Tensor, *others: Any) -> Tensor:
    """Implement `KernelTable.relu2_moe` by grouped products, or by the reference where `moe` uses
    it; `others` are the entry's arguments after `hidden`. Returns [T, H]."""
    if torch.compiler.is_compiling() and hidden.dtype is not torch.bfloat16:
        return reference_relu2_moe(hidden, *others)
    return grouped_relu2_moe(hidden, *others)


def takes_grouped(hidden: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, *others: Any) -> str:
    """Return why torch's grouped product refuses the call, empty if it takes it: rows of hidden
    size and of intermediate size must be multiples of 16 bytes. For experts with a gate (w13 [E, 2
    * I, H])."""
    return _whole_rows(hidden, w13.shape[1] // 2)


def takes_plain_grouped(hidden: Tensor, weights: Tensor, ids: Tensor, w1: Tensor, *others: Any) -> str:
    """Return why torch's grouped product refuses the call of experts without a gate (w1 [E, I, H]),
    empty if it takes it: rows must be multiples of 16 bytes."""
    return _whole_rows(hidden, w1.shape[1])


def _whole_rows(hidden: Tensor, inner: int) -> str:
    sizes = hidden.shape[1], inner
    if all(size * hidden.dtype.itemsize % 16 == 0 for size in sizes):
        return ""
    return f"rows of {sizes[0]} and {sizes[1]} elements are not multiples of 16 bytes"


class CacheLocations:
    """The table's entry `cache_locations`, with NumPy on the tensors' memory: a third of the time
    of the same torch calls.

    The buffers of a steady step are the same objects each time, so their arrays are cached.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Tensor, np.ndarray]] = {}

    def __call__(self, page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int, out: Tensor) -> None:
        """Implement `KernelTable.cache_locations`: write the KV slot of each token's position to
        `out` int [T] (the entry's `out_cache_loc`). All tensors must be in host memory."""
        array = self._array
        pages, offsets = np.divmod(array(positions), page_size)
        np.add(array(page_table)[array(slots), pages] * page_size, offsets, out=array(out))

    def _array(self, tensor: Tensor) -> np.ndarray:
        """Return a NumPy array that shares the tensor's memory, from the cache if it is there; the
        cache keeps the tensor alive, so its id is not reused. A full cache is emptied first."""
        found = self._arrays.get(id(tensor))
        if found is None:
            if len(self._arrays) >= REMEMBERED:
                self._arrays.clear()
            found = self._arrays[id(tensor)] = (tensor, tensor.numpy())
        return found[1]


def takes_whole_heads(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int) -> str:
    """Return why `Rotary` refuses the call, empty if it takes it: heads must be rotated whole, that
    is the cache's width must be head_dim."""
    rotated = cos_sin_cache.shape[1]
    return "" if rotated == head_dim else f"{rotated} of {head_dim} elements of a head are rotated"


class Rotary:
    """Rotary embedding x * cos + swapped(x) * sin, for q and k in one call if they are adjacent in
    memory.

    For heads that are rotated whole. torch.compile fuses the reference better than this, so it gets
    the reference. For each cos/sin cache and dtype it keeps a table with both halves written out:
    rows of [cos, cos, -sin, sin].
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Implement `KernelTable.rotary`: return rotated q [T, heads * D] and k [T, kv_heads * D];
        the arguments do not change. The two results may be views of one new tensor."""
        if torch.compiler.is_compiling():
            return reference_rotary(q, k, positions, cos_sin_cache, head_dim)
        rows = self._table(cos_sin_cache, q.dtype).index_select(0, positions).unsqueeze(1)
        cos, sin = rows.split(head_dim, dim=-1)
        tokens, width = q.shape
        if _are_neighbours(q, k):
            heads = (width + k.shape[1]) // head_dim
            both = q.as_strided((tokens, heads, head_dim), (q.stride(0), head_dim, 1))
            rotated = _rotate(both, cos, sin).view(tokens, heads * head_dim)
            return rotated[:, :width], rotated[:, width:]
        return _rotate_flat(q, cos, sin, head_dim), _rotate_flat(k, cos, sin, head_dim)

    def _table(self, cache: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the written-out table [P, 4 * D / 2] of `cache` in `dtype`, made at the first
        call; the entry keeps `cache` alive, so its id is not reused."""
        key = (id(cache), dtype)
        if key not in self._tables:
            cos, sin = cache.chunk(2, dim=-1)
            self._tables[key] = (cache, torch.cat([cos, cos, -sin, sin], dim=-1).to(dtype))
        return self._tables[key][1]


def _are_neighbours(q: Tensor, k: Tensor) -> bool:
    return q.stride(0) == k.stride(0) and k.data_ptr() == q.data_ptr() + q.shape[1] * q.element_size()


def _rotate_flat(x: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    tokens, width = x.shape
    return _rotate(x.view(tokens, width // head_dim, head_dim), cos, sin).view(tokens, width)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [T, heads, D] rotated, as a new tensor: x * cos + swapped(x) * sin. cos [T, 1, D];
    sin [T, 1, D] has the minus signs in its first half."""
    tokens, heads, head_dim = x.shape
    swapped = x.view(tokens, heads, 2, head_dim // 2).flip(2).view(tokens, heads, head_dim)
    return swapped.mul_(sin).addcmul_(x, cos)


def torch_kernels() -> KernelTable:
    """Return a new kernel table of torch's functions: the reference, with the entries of this
    module in place of its own or before it."""
    return KernelTable().replace(
        linear=linear,
        pack_linear=pack_linear,
        rms_norm=Limited(rms_norm, takes_one_dtype),
        add_rms_norm=Limited(add_rms_norm, takes_one_dtype),
        moe=Limited(moe, takes_grouped),
        relu2_moe=Limited(relu2_moe, takes_plain_grouped),
        clamped_moe=Limited(clamped_moe, takes_grouped),
        rotary=Limited(Rotary(), takes_whole_heads),
        store_kv=store_kv,
        cache_locations=CacheLocations(),
    )
