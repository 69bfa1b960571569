"""Where requests and their KV live on the device: a page table by slot, and cells by layer.

Slot 0 and page 0 belong to nobody: padding rows point at them, so whatever they write or read harms no request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.step.tables import new_pages

LayerShapes: TypeAlias = tuple[tuple[int, int], ...]
"""(kv_heads, head_dim) of each layer."""


class ReqToTokenPool:
    """Which pages hold each slot's tokens: `page_table` int32[slots + 1, pages per request], on the device."""

    def __init__(self, max_requests: int, max_model_len: int, page_size: int, device: str) -> None:
        self.page_size = page_size
        self.max_pages = -(-max_model_len // page_size) + 1
        self.page_table = torch.zeros(max_requests + 1, self.max_pages, dtype=torch.int32, device=device)

    def changes(self, batch: ScheduleBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """The step's page-table differences: int32[N] entries of the flat table, and the int32[N] pages to write there.

        None if there are none. Raises ValueError if a row's do not fit.
        """
        entries = new_pages(batch)
        if entries is None:
            return None
        slots, columns, pages = entries
        most = int(columns.max()) + 1
        if most > self.max_pages:
            raise ValueError(f"a row of step {batch.step} has {most} pages, its slot holds {self.max_pages}")
        return slots * np.int32(self.max_pages) + columns, pages

    def write(self, entries: Tensor, pages: Tensor) -> None:
        """Write what `changes` gave, once it is on the device. Does not wait."""
        self.page_table.view(-1).index_copy_(0, entries.long(), pages)


class TokenToKVPool(Protocol):
    """The cells of `num_layers` layers. `generation` changes whenever an address does."""

    generation: int
    page_size: int
    num_cells: int
    num_layers: int

    def kv(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """The layer's key and value cells, each [cells, kv_heads, head_dim]."""
        ...


class MHATokenToKVPool:
    """Keys and values of multi-head or grouped-query attention, one pair of tensors a layer, cell-major."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layers: LayerShapes,
        dtype: torch.dtype,
        device: str,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        """`layers` holds (kv_heads, head_dim) of each layer; page 0 is added to `num_pages`. `zeros(shape, dtype)`: where
        the cells come from, if not from torch, which writes all of them at once."""
        self.generation = 0
        self.page_size = page_size
        self.num_cells = (num_pages + 1) * page_size
        self.num_layers = len(layers)
        self.dtype = dtype
        self._zeros = zeros or partial(_torch_zeros, device)
        self._shapes = [(self.num_cells, heads, head_dim) for heads, head_dim in layers]
        self._kv = self._allocate()

    def kv(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """The layer's key and value cells, each [cells, kv_heads, head_dim]."""
        return self._kv[layer_id]

    def replace_storage(self) -> None:
        """Move to new, zeroed memory: every address changes, so plans and graphs made before are refused."""
        self._kv = self._allocate()
        self.generation += 1

    def _allocate(self) -> list[tuple[Tensor, Tensor]]:
        return [(self._zeros(shape, self.dtype), self._zeros(shape, self.dtype)) for shape in self._shapes]


def _torch_zeros(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def cell_bytes(layers: LayerShapes, dtype: torch.dtype) -> int:
    """Bytes of one token's KV over all layers: 2 * kv_heads * head_dim * element size, summed."""
    return sum(2 * heads * head_dim for heads, head_dim in layers) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PoolKind:
    """How a device keeps keys and values. `make_pool(num_pages, page_size, layers, dtype, device)` allocates them for a model
    that is computed in `dtype`; `cell_bytes(layers, dtype)` are those of one token over all layers; `kv_cache_dtype` is what
    a configuration asks for to have them."""

    make_pool: Callable[[int, int, LayerShapes, torch.dtype, str], TokenToKVPool]
    cell_bytes: Callable[[LayerShapes, torch.dtype], int]
    kv_cache_dtype: str = "auto"


PER_HEAD = PoolKind(MHATokenToKVPool, cell_bytes)
"""In the model's type, by head."""
