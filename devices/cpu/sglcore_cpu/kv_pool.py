"""Cells of 8 bits: a head's keys or values as signed bytes, and behind them their scale, so that
one tensor says it all.

Half the memory of bfloat16, and half the traffic of a long context. x = code * scale, scale =
largest magnitude / 127.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sglcore.runtime.kernels.table import KernelTable
from sglcore.runtime.memory.pools import LayerShapes, MHATokenToKVPool, PoolKind, cell_bytes
from sglcore_cpu.arena import huge_zeros
from sglcore_cpu.native import TYPES, Engine
from sglcore_cpu.table import engine_of

SCALE_BYTES = 4
"""A float32 for each cell and head."""
INT8 = "int8"
"""Cell-major, keys and values apart, each uint8 [cells, kv_heads, head_dim + 4]."""


def _wider(layers: LayerShapes) -> LayerShapes:
    return tuple((heads, head_dim + SCALE_BYTES) for heads, head_dim in layers)


class Int8TokenToKVPool(MHATokenToKVPool):
    """Cells of bytes, as many for keys as for values, on huge pages, whatever the type of the
    model."""

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
        """`kernels` are native; raises Unavailable for others, or MemoryError."""
        table = kernels.replace(store_kv=Int8Store(engine_of(kernels)))
        super().__init__(num_pages, page_size, _wider(layers), torch.uint8, device, table, huge_zeros)
        self._computed_in = dtype

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """In the type of the model."""
        keys, values = super().read_cells(layer_id, cells)
        return read_int8(keys).to(self._computed_in), read_int8(values).to(self._computed_in)

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """As it stores; there is one rounding."""
        self.store(layer_id, keys, values, cells)


def int8_cell_bytes(layers: LayerShapes, dtype: torch.dtype) -> int:
    """Bytes of one token's KV over all layers: 2 * kv_heads * (head_dim + 4), summed."""
    return cell_bytes(_wider(layers), torch.uint8)


INT8_POOL = PoolKind(Int8TokenToKVPool, int8_cell_bytes, kv_cache_dtype="int8")
"""What `--kv-cache-dtype int8` asks for."""


def read_int8(cells: Tensor) -> Tensor:
    """Cells uint8 [..., head_dim + 4] as float32 [..., head_dim]: what attention takes them for."""
    codes = cells[..., :-SCALE_BYTES].contiguous().view(torch.int8)
    return codes.float() * cells[..., -SCALE_BYTES:].contiguous().view(torch.float32)


class Int8Store:
    """`store_kv` for cells of 8 bits."""

    def __init__(self, engine: Engine) -> None:
        self._store = engine.kernel("store_kv_int8").bind()

    def __call__(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, out_cache_loc: Tensor) -> None:
        """As the table says: row t of key and value [T, kv_heads, D] into cell out_cache_loc[t],
        int64 [T]. Raises TypeError for another type of rows or locations."""
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
