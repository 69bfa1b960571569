"""KV cache of 8 bits: a head's keys or values as signed bytes, followed by their float32 scale in
the same tensor.

x = code * scale, scale = largest magnitude / 127. About half the memory of bfloat16, and half the
memory traffic of a long context.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import LayerShapes, MHATokenToKVPool, PoolKind, cell_bytes
from sglcore_cpu.arena import huge_zeros
from sglcore_cpu.kernels.table import engine_of
from sglcore_cpu.native import TYPES, Engine

SCALE_BYTES = 4
"""One float32 for each KV slot and head."""
INT8 = "int8"
"""Layout: keys and values in separate tensors, each uint8 [KV slots, kv_heads, head_dim + 4]."""


def _wider(layers: LayerShapes) -> LayerShapes:
    return tuple((heads, head_dim + SCALE_BYTES) for heads, head_dim in layers)


class Int8TokenToKVPool(MHATokenToKVPool):
    """A KV pool of 8-bit codes on huge pages, for a model of any dtype. Keys and values have the
    same shape, uint8 [KV slots, kv_heads, head_dim + 4] in each layer."""

    layout: ClassVar[str] = INT8

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layers: LayerShapes,
        dtype: torch.dtype,
        device: str,
        kernels: KernelTable,
    ) -> None:
        """`layers`: (kv_heads, head_dim) of each layer, without the scale's bytes. `dtype`: the
        model's, which `read_cells` returns. `kernels` must be a native table; raises Unavailable
        for another, and MemoryError."""
        table = kernels.replace(store_kv=Int8Store(engine_of(kernels)))
        super().__init__(num_pages, page_size, _wider(layers), torch.uint8, device, table, huge_zeros)
        self._computed_in = dtype

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `TokenToKVPool.read_cells`: return copies of keys and values [N, kv_heads,
        head_dim] at the KV slots `cells` [N], dequantised to the model's dtype."""
        keys, values = super().read_cells(layer_id, cells)
        return read_int8(keys).to(self._computed_in), read_int8(values).to(self._computed_in)

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Implements `TokenToKVPool.write_cells`: quantise keys and values [N, kv_heads, head_dim]
        of float32 or bfloat16 and write them to the KV slots `cells`, int64 [N], as `store`
        does."""
        self.store(layer_id, keys, values, cells)


def int8_cell_bytes(layers: LayerShapes, dtype: torch.dtype) -> int:
    """Return the bytes of one token in all layers: the sum of 2 * kv_heads * (head_dim + 4).
    `dtype` is not used."""
    return cell_bytes(_wider(layers), torch.uint8)


INT8_POOL = PoolKind(Int8TokenToKVPool, int8_cell_bytes, kv_cache_dtype="int8", windows=Int8TokenToKVPool.windows)
"""The kind of pool that `--kv-cache-dtype int8` selects."""


def read_int8(cells: Tensor) -> Tensor:
    """Dequantise KV slots uint8 [..., head_dim + 4] to float32 [..., head_dim], the values that
    attention uses."""
    codes = cells[..., :-SCALE_BYTES].contiguous().view(torch.int8)
    return codes.float() * cells[..., -SCALE_BYTES:].contiguous().view(torch.float32)


class Int8Store:
    """The table's entry `store_kv` for KV slots of 8 bits: quantises while it stores."""

    def __init__(self, engine: Engine) -> None:
        self._store = engine.kernel("store_kv_int8").bind()

    def __call__(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
        """Implement `KernelTable.store_kv`: quantise row t of key and value [T, kv_heads, D] and
        store it in KV slot out_cache_loc[t] (int64) of both caches, uint8 [KV slots, kv_heads, D +
        4]. Raises TypeError unless the rows are float32 or bfloat16, both alike, and the locations
        int64. Waits."""
        if key.dtype not in TYPES or value.dtype is not key.dtype or out_cache_loc.dtype is not torch.int64:
            raise TypeError(
                f"found keys of {key.dtype}, values of {value.dtype} at {out_cache_loc.dtype} cells; wanted float32 or "
                "bfloat16 at int64 cells; use --kv-cache-dtype auto"
            )
        tokens, kv_heads, dim = key.shape
        key, value = _rows(key), _rows(value)
        self._store(
            key=key.data_ptr(),
            key_stride=key.stride(0),
            value=value.data_ptr(),
            value_stride=value.stride(0),
            type=TYPES[key.dtype],
            keys=k_cache.data_ptr(),
            values=v_cache.data_ptr(),
            locations=out_cache_loc.data_ptr(),
            tokens=tokens,
            kv_heads=kv_heads,
            dim=dim,
        )


def _rows(x: Tensor) -> Tensor:
    """Return x with contiguous heads within a row; rows may have gaps between them."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
