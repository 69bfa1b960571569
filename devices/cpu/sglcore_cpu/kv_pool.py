"""Cells of 8 bits: a head's keys or values as signed bytes, and behind them their scale, so that one tensor says it all.

Half the memory of bfloat16, and half the traffic of a long context. x = code * scale, scale = largest magnitude / 127.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sglcore.runtime.memory.pools import LayerShapes, MHATokenToKVPool, PoolKind, cell_bytes
from sglcore_cpu.arena import huge_zeros
from sglcore_cpu.native import TYPES, Engine

SCALE_BYTES = 4
"""A float32 for each cell and head."""


def make_int8_pool(
    num_pages: int, page_size: int, layers: LayerShapes, dtype: torch.dtype, device: str
) -> MHATokenToKVPool:
    """Cells of bytes [cells, kv_heads, head_dim + 4], as many for keys as for values, on huge pages; whatever the `dtype` of
    the model. Raises MemoryError."""
    return MHATokenToKVPool(num_pages, page_size, _wider(layers), torch.uint8, device, huge_zeros)


def int8_cell_bytes(layers: LayerShapes, dtype: torch.dtype) -> int:
    """Bytes of one token's KV over all layers: 2 * kv_heads * (head_dim + 4), summed."""
    return cell_bytes(_wider(layers), torch.uint8)


def _wider(layers: LayerShapes) -> LayerShapes:
    return tuple((heads, head_dim + SCALE_BYTES) for heads, head_dim in layers)


INT8_POOL = PoolKind(make_int8_pool, int8_cell_bytes, kv_cache_dtype="int8")
"""What `--kv-cache-dtype int8` asks for."""


def read_int8(cells: Tensor) -> Tensor:
    """Cells uint8 [..., head_dim + 4] as float32 [..., head_dim]: what attention takes them for."""
    codes = cells[..., :-SCALE_BYTES].contiguous().view(torch.int8)
    return codes.float() * cells[..., -SCALE_BYTES:].contiguous().view(torch.float32)


class Int8Store:
    """The table's entry `store_kv` for cells of 8 bits; other cells go to `other`."""

    def __init__(self, engine: Engine, other: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]) -> None:
        self._store = engine.kernel("store_kv_int8").bind()
        self._other = other

    def __call__(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
        """As the table says: row t of key and value [T, kv_heads, D] into cell out_cache_loc[t], int64 [T]. Raises
        TypeError for another type of rows or locations."""
        if k_cache.dtype is not torch.uint8:
            self._other(key, value, k_cache, v_cache, out_cache_loc)
            return
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
    """Heads side by side; rows may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
