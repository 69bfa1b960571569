"""Small operations of the kernel table by the native kernels: embedding, norms, activations, rotary
embedding, and stores to the KV cache.

Models use them in float32 and bfloat16 (`operands.takes`). Tensors that the kernels do not read,
such as rows with gaps between their elements, go to the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglcore.runtime.kernels.reference_kernels import norm_rotary_and_store as reference_norm_rotary_and_store
from sglcore.runtime.kernels.reference_kernels import rotary_and_store as reference_rotary_and_store
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.kernels.implements import implements
from sglcore_cpu.kernels.operands import INDEX_BYTES, can_rotate, can_store, rows_of, takes, type_of_norm
from sglcore_cpu.native import TYPES, Engine


class Operations:
    """Implements the kernel table's entries for small operations by methods of the same names, on
    one engine; `cast` is no entry, and `embedding` is called by `NativeLinear.embedding`, which is.
    Each call waits for its result."""

    def __init__(self, engine: Engine) -> None:
        self._empty = engine.empty
        self._reference = KernelTable()
        self._rms_norm, self._add_rms_norm, self._layer_norm = (
            engine.kernel(name).bind() for name in ("rms_norm", "add_rms_norm", "layer_norm")
        )
        self._silu_and_mul, self._limited_silu_and_mul, self._gelu_tanh_and_mul, self._gelu = (
            engine.kernel(name).bind() for name in ("silu_and_mul", "limited_silu_and_mul", "gelu_tanh_and_mul", "gelu")
        )
        self._rotate, self._copy_rows, self._embedding, self._cache_locations = (
            engine.kernel(name).bind() for name in ("rotate", "copy_rows", "embedding", "cache_locations")
        )

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the rows `ids` (int32 or int64 [T]) of an unpacked weight [vocab, H] of any dtype,
        as a new tensor [T, H]. `NativeLinear.embedding` calls it."""
        ids_bytes, strides = INDEX_BYTES.get(ids.dtype), weight.stride()
        if ids_bytes is None or ids.dim() != 1 or strides[1] != 1 or ids.stride() != (1,):
            return self._reference.embedding(ids, weight)
        rows, width, size = ids.numel(), weight.shape[1], weight.element_size()
        out = self._empty(rows, width, dtype=weight.dtype)
        self._embedding(
            ids=ids.data_ptr(),
            ids_bytes=ids_bytes,
            weight=weight.data_ptr(),
            weight_stride=strides[0] * size,
            out=out.data_ptr(),
            rows=rows,
            row_bytes=width * size,
        )
        return out

    @implements(takes)
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Implement `KernelTable.rms_norm`: x [..., N], with any number of dimensions, weight [N]
        -> a new tensor [..., N] of x's dtype."""
        element, rows = TYPES.get(x.dtype), rows_of(x)
        weight_type = type_of_norm(weight, x)
        if element is None or rows is None or weight_type is None:
            return self._reference.rms_norm(x, weight, eps)
        count, outer_stride, inner, inner_stride, width = rows
        out = self._empty(*x.shape, dtype=x.dtype)
        self._rms_norm(
            x=x.data_ptr(),
            outer_stride=outer_stride,
            inner=inner,
            inner_stride=inner_stride,
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            rows=count,
            width=width,
            type=element,
            weight_type=weight_type,
            eps=eps,
        )
        return out

    @implements(takes)
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Implement `KernelTable.add_rms_norm`: return (norm, sum) of x and residual [T, H]. The
        kernel works in place: the norm is in x, the sum in `residual`; the reference, for tensors
        that it does not read, returns new ones."""
        element, x_stride, residual_stride = TYPES.get(x.dtype), x.stride(), residual.stride()
        weight_type = type_of_norm(weight, x)
        if element is None or weight_type is None or residual.dtype is not x.dtype or x.dim() != 2:
            return self._reference.add_rms_norm(x, residual, weight, eps)
        if x_stride[1] != 1 or residual_stride[1] != 1:
            return self._reference.add_rms_norm(x, residual, weight, eps)
        rows, width = x.shape
        self._add_rms_norm(
            x=x.data_ptr(),
            x_stride=x_stride[0],
            residual=residual.data_ptr(),
            residual_stride=residual_stride[0],
            weight=weight.data_ptr(),
            rows=rows,
            width=width,
            type=element,
            weight_type=weight_type,
            eps=eps,
        )
        return x, residual

    @implements(takes)
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Implement `KernelTable.layer_norm`: x [T, H], weight and bias [H] -> a new tensor [T, H].
        Mean and variance take two passes, so a large mean loses no precision."""
        element, strides = TYPES.get(x.dtype), x.stride()
        if element is None or len(strides) != 2 or strides[1] != 1 or weight.stride() != (1,) or bias.stride() != (1,):
            return self._reference.layer_norm(x, weight, bias, eps)
        if weight.dtype is not x.dtype or bias.dtype is not x.dtype:
            return self._reference.layer_norm(x, weight, bias, eps)
        rows, width = x.shape
        out = self._empty(rows, width, dtype=x.dtype)
        self._layer_norm(
            x=x.data_ptr(),
            x_stride=strides[0],
            weight=weight.data_ptr(),
            bias=bias.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            width=width,
            type=element,
            eps=eps,
        )
        return out

    @implements(takes)
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """Implement `KernelTable.silu_and_mul`: silu(gate) * up for rows [gate, up], so x [T, 2 *
        I] -> [T, I]."""
        element, strides = TYPES.get(x.dtype), x.stride()
        if element is None or len(strides) != 2 or strides[1] != 1:
            return self._reference.silu_and_mul(x)
        rows, width = x.shape
        out = self._empty(rows, width // 2, dtype=x.dtype)
        self._silu_and_mul(
            x=x.data_ptr(), x_stride=strides[0], out=out.data_ptr(), rows=rows, width=width // 2, type=element
        )
        return out

    @implements(takes)
    def limited_silu_and_mul(self, x: Tensor, limit: float) -> Tensor:
        """Implement `KernelTable.limited_silu_and_mul`: silu(min(gate, limit)) * clamp(up, -limit,
        limit) for rows [gate, up], so x [T, 2 * I] -> [T, I]."""
        element, strides = TYPES.get(x.dtype), x.stride()
        if element is None or len(strides) != 2 or strides[1] != 1:
            return self._reference.limited_silu_and_mul(x, limit)
        rows, width = x.shape
        out = self._empty(rows, width // 2, dtype=x.dtype)
        self._limited_silu_and_mul(
            x=x.data_ptr(),
            x_stride=strides[0],
            out=out.data_ptr(),
            rows=rows,
            width=width // 2,
            type=element,
            limit=limit,
        )
        return out

    @implements(takes)
    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        """Implement `KernelTable.gelu_tanh_and_mul`: gelu_tanh(gate) * up for rows [gate, up], so x
        [T, 2 * I] -> [T, I]."""
        element, strides = TYPES.get(x.dtype), x.stride()
        if element is None or len(strides) != 2 or strides[1] != 1:
            return self._reference.gelu_tanh_and_mul(x)
        rows, width = x.shape
        out = self._empty(rows, width // 2, dtype=x.dtype)
        self._gelu_tanh_and_mul(
            x=x.data_ptr(), x_stride=strides[0], out=out.data_ptr(), rows=rows, width=width // 2, type=element
        )
        return out

    @implements(takes)
    def gelu(self, x: Tensor) -> Tensor:
        """Implement `KernelTable.gelu`: x [T, I] -> a new tensor [T, I], with an error function
        that is accurate to 3e-7."""
        element, strides = TYPES.get(x.dtype), x.stride()
        if element is None or len(strides) != 2 or strides[1] != 1:
            return self._reference.gelu(x)
        rows, width = x.shape
        out = self._empty(rows, width, dtype=x.dtype)
        self._gelu(x=x.data_ptr(), x_stride=strides[0], out=out.data_ptr(), rows=rows, width=width, type=element)
        return out

    @implements(takes)
    def rotary(
        self, q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Implement `KernelTable.rotary`: return rotated q [T, heads * D] and k [T, kv_heads * D]
        in new tensors."""
        if not can_rotate(q, k, positions, cos_sin_cache):
            return self._reference.rotary(q, k, positions, cos_sin_cache, head_dim)
        out = self._empty(*k.shape, dtype=k.dtype)
        return self._rotated(q, k, None, positions, cos_sin_cache, head_dim, (out, None, None), (None, None, 0.0)), out

    @implements(takes)
    def rotary_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        head_dim: int,
        k_cache: Tensor,
        v_cache: Tensor,
        out_cache_loc: Tensor,
    ) -> Tensor:
        """Implement `KernelTable.rotary_and_store`: return rotated q [T, heads * D] in a new
        tensor; write rotated keys, and values, to their KV slots `out_cache_loc` of the caches. k
        itself does not change."""
        cells = k_cache, v_cache, out_cache_loc
        if not can_rotate(q, k, positions, cos_sin_cache) or not can_store(q, v, *cells):
            return reference_rotary_and_store(q, k, v, positions, cos_sin_cache, head_dim, *cells)
        return self._rotated(q, k, v, positions, cos_sin_cache, head_dim, cells, (None, None, 0.0))

    @implements(takes)
    def norm_rotary_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        head_dim: int,
        k_cache: Tensor,
        v_cache: Tensor,
        out_cache_loc: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
    ) -> Tensor:
        """Implement `KernelTable.norm_rotary_and_store`: as `rotary_and_store`, after an RMS norm
        of each head of q and k (weights [D]), in one pass. Returns rotated q [T, heads * D]."""
        cells, norms = (k_cache, v_cache, out_cache_loc), (q_weight, k_weight, eps)
        q_type, k_type = type_of_norm(q_weight, q), type_of_norm(k_weight, q)
        if (
            q_type is None
            or q_type != k_type
            or not can_rotate(q, k, positions, cos_sin_cache)
            or not can_store(q, v, *cells)
        ):
            return reference_norm_rotary_and_store(q, k, v, positions, cos_sin_cache, head_dim, *cells, *norms)
        return self._rotated(q, k, v, positions, cos_sin_cache, head_dim, cells, norms)

    def _rotated(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        positions: Tensor,
        cos_sin_cache: Tensor,
        head_dim: int,
        store: tuple[Tensor, Tensor | None, Tensor | None],
        norms: tuple[Tensor | None, Tensor | None, float],
    ) -> Tensor:
        """Run the rotary kernel; return rotated q [T, heads * D]. `store`: (tensor for rotated k,
        None, None), or (k_cache, v_cache, KV slots) to write k and v there. `norms`: (weight for q,
        weight for k, eps); weights None: no norm."""
        (k_out, v_out, cells), (q_norm, k_norm, eps) = store, norms
        tokens, width = q.shape
        out = self._empty(tokens, width, dtype=q.dtype)
        self._rotate(
            q=q.data_ptr(),
            q_stride=q.stride()[0],
            k=k.data_ptr(),
            k_stride=k.stride()[0],
            v=0 if v is None else v.data_ptr(),
            v_stride=0 if v is None else v.stride()[0],
            q_out=out.data_ptr(),
            k_out=k_out.data_ptr(),
            v_out=0 if v_out is None else v_out.data_ptr(),
            out_stride=k_out.stride()[0],
            cells=0 if cells is None else cells.data_ptr(),
            cells_bytes=0 if cells is None else INDEX_BYTES[cells.dtype],
            positions=positions.data_ptr(),
            positions_bytes=INDEX_BYTES[positions.dtype],
            cos_sin=cos_sin_cache.data_ptr(),
            cos_sin_stride=cos_sin_cache.stride()[0],
            q_norm=0 if q_norm is None else q_norm.data_ptr(),
            k_norm=0 if k_norm is None else k_norm.data_ptr(),
            eps=eps,
            tokens=tokens,
            q_heads=width // head_dim,
            kv_heads=k.shape[1] // head_dim,
            head_dim=head_dim,
            rotary_dim=cos_sin_cache.shape[1],
            type=TYPES[q.dtype],
            store_type=TYPES[k_out.dtype],
            norm_type=0 if q_norm is None else TYPES[q_norm.dtype],
        )
        return out

    @implements(takes)
    def store_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
        """Implement `KernelTable.store_kv` in one pass: row t of key and value [T, kv_heads, D] is
        written to KV slot out_cache_loc[t] of both caches, cast to their dtype."""
        if value.stride()[1:] != key.stride()[1:] or not can_store(key, value, k_cache, v_cache, out_cache_loc):
            return self._reference.store_kv(key, value, k_cache, v_cache, out_cache_loc)
        rows, heads, head_dim = key.shape
        self._copy_rows(
            x=key.data_ptr(),
            x_stride=key.stride()[0],
            y=value.data_ptr(),
            y_stride=value.stride()[0],
            out=k_cache.data_ptr(),
            second=v_cache.data_ptr(),
            out_stride=k_cache.stride()[0],
            cells=out_cache_loc.data_ptr(),
            cells_bytes=INDEX_BYTES[out_cache_loc.dtype],
            rows=rows,
            width=heads * head_dim,
            type=TYPES[key.dtype],
            out_type=TYPES[k_cache.dtype],
        )
        return None

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of x [T, N], with any row stride, as a new contiguous tensor of `dtype`,
        even if x has that dtype."""
        element, out_type, strides = TYPES.get(x.dtype), TYPES.get(dtype), x.stride()
        if element is None or out_type is None or len(strides) != 2 or strides[1] != 1:
            return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
        rows, width = x.shape
        out = self._empty(rows, width, dtype=dtype)
        self._copy_rows(
            x=x.data_ptr(),
            x_stride=strides[0],
            y=0,
            y_stride=0,
            out=out.data_ptr(),
            second=0,
            out_stride=width,
            cells=0,
            cells_bytes=0,
            rows=rows,
            width=width,
            type=element,
            out_type=out_type,
        )
        return out

    @implements()
    def cache_locations(
        self, page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int, out: Tensor
    ) -> None:
        """Implement `KernelTable.cache_locations`: write the KV slot of each token's position to
        `out` [T], int32 or int64 (the entry's `out_cache_loc`). Runs on the calling thread, except
        for very long prompts."""
        out_bytes, table_stride = INDEX_BYTES.get(out.dtype), page_table.stride()
        is_plain = slots.stride() == positions.stride() == out.stride() == (1,) and table_stride[1] == 1
        are_int32 = page_table.dtype is slots.dtype is positions.dtype is torch.int32
        if out_bytes is None or not is_plain or not are_int32:
            return self._reference.cache_locations(page_table, slots, positions, page_size, out)
        self._cache_locations(
            page_table=page_table.data_ptr(),
            table_stride=table_stride[0],
            slots=slots.data_ptr(),
            positions=positions.data_ptr(),
            page_size=page_size,
            out=out.data_ptr(),
            out_bytes=out_bytes,
            tokens=out.numel(),
        )
        return None
