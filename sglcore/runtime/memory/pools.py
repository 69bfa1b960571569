"""Where requests and their KV live on the device: a page table by slot, and cells by layer.

Slot 0 and page 0 belong to nobody: padding rows point at them, so whatever they write or read harms no request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.device.batch import ScheduleBatch
from sglcore.runtime.kernels import reference
from sglcore.step.tables import Entries, new_pages, new_window_pages

if TYPE_CHECKING:
    from sglcore.runtime.kernels.table import KernelTable

CELL_MAJOR = "cell_major"
"""Keys and values apart, each [cells, kv_heads, head_dim]: what every entry of the kernel table that stores takes."""
PAGE_MAJOR = "page_major"
"""Keys and values apart, each [pages, kv_heads, page_size, head_dim]."""

LayerShapes: TypeAlias = tuple[tuple[int, int], ...]
"""(kv_heads, head_dim) of each layer; no heads where a pool keeps nothing of it."""


def pages_of(max_model_len: int, page_size: int) -> int:
    """Pages for which a slot has room, of a request of at most so many tokens."""
    return -(-max_model_len // page_size) + 1


class ReqToTokenPool:
    """Which pages hold each slot's tokens: `page_table` int32[slots + 1, pages per request], on the device."""

    def __init__(self, max_requests: int, max_model_len: int, page_size: int, device: str) -> None:
        self.page_size = page_size
        self.max_pages = pages_of(max_model_len, page_size)
        self.page_table = torch.zeros(max_requests + 1, self.max_pages, dtype=torch.int32, device=device)

    @property
    def max_tokens(self) -> int:
        """Tokens for which a slot has room."""
        return self.max_pages * self.page_size

    def changes(self, batch: ScheduleBatch) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """The step's page-table differences: int32[N] entries of the flat table, and the int32[N] pages to write there.

        None if there are none. Raises ValueError if a row's do not fit.
        """
        entries = self._new_entries(batch)
        if entries is None:
            return None
        slots, columns, pages = entries
        most = int(columns.max()) + 1
        if most > self.max_pages:
            raise ValueError(f"a row of step {batch.step} has {most} pages, its slot holds {self.max_pages}")
        return slots * np.int32(self.max_pages) + columns, pages

    def write(self, entries: Tensor, pages: Tensor) -> None:
        """Write what `changes` gave, once it is on the device. Does not wait."""
        self.page_table.view(-1).scatter_(0, entries, pages)

    def _new_entries(self, batch: ScheduleBatch) -> Entries | None:
        return new_pages(batch)


class WindowTable(ReqToTokenPool):
    """The same of window pages: a slot's first is that which holds the token `ScheduleBatch.window_starts`."""

    def __init__(self, max_requests: int, window: int, max_batch_tokens: int, page_size: int, device: str) -> None:
        """A slot holds what a step of `max_batch_tokens` tokens sees, wherever in a page that begins and ends."""
        super().__init__(max_requests, window + max_batch_tokens + page_size, page_size, device)

    def _new_entries(self, batch: ScheduleBatch) -> Entries | None:
        return new_window_pages(batch)


class KVPool(Protocol):
    """What `num_layers` layers keep of the tokens of pages. `generation` changes whenever an address does. How it lies is the
    pool's own: `layout` names it, and backends name those that they take."""

    generation: int
    page_size: int
    num_cells: int
    num_layers: int
    layout: ClassVar[str]

    def kv(self, layer_id: int) -> Any:
        """The layer's storage as this layout has it, for who knows the layout."""
        ...


class TokenToKVPool(KVPool, Protocol):
    """Cells with keys and values by head. Whoever knows no layout works through `read_cells` and `write_cells`. A forward calls
    `store` and `kv` for each layer."""

    def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
        """Row t of key and value [T, kv_heads, head_dim] into cell out_cache_loc[t]. Cells are distinct, but for padding
        rows, which name cell 0. Runs inside graphs; reads nothing on the host."""
        ...

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of cells int [N], each a new [N, kv_heads, head_dim] in the type that attention computes in. Runs
        inside graphs."""
        ...

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """The inverse, by plain torch: keys and values [N, kv_heads, head_dim] into distinct cells, and no other."""
        ...


class MHATokenToKVPool:
    """Keys and values of multi-head or grouped-query attention, one pair of tensors a layer, cell-major."""

    layout: ClassVar[str] = CELL_MAJOR

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        layers: LayerShapes,
        dtype: torch.dtype,
        device: str,
        kernels: KernelTable | None = None,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        """`layers` holds (kv_heads, head_dim) of each layer; page 0 is added to `num_pages`. `kernels`: whose `store_kv`
        stores; the reference's without. `zeros(shape, dtype)`: where the cells come from, if not from torch, which writes
        all of them at once."""
        self.generation = 0
        self.page_size = page_size
        self.num_cells = (num_pages + 1) * page_size
        self.num_layers = len(layers)
        self.dtype = dtype
        self._store_kv = reference.store_kv if kernels is None else kernels.store_kv
        self._zeros = zeros or partial(_torch_zeros, device)
        self._shapes = [self._shape(heads, head_dim) for heads, head_dim in layers]
        self._kv = self._allocate()

    def kv(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, each [cells, kv_heads, head_dim], or as another `layout` says."""
        return self._kv[layer_id]

    def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
        """By the table's `store_kv`."""
        self._store_kv(key, value, *self._kv[layer_id], out_cache_loc)

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Two gathers."""
        keys, values = self._kv[layer_id]
        return keys.index_select(0, cells), values.index_select(0, cells)

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """By the reference's `store_kv`."""
        reference.store_kv(keys, values, *self._kv[layer_id], cells)

    def replace_storage(self) -> None:
        """Move to new, zeroed memory: every address changes, so plans and graphs made before are refused."""
        self._kv = self._allocate()
        self.generation += 1

    def _shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        return self.num_cells, heads, head_dim

    def _allocate(self) -> list[tuple[Tensor, Tensor]]:
        return [(self._zeros(shape, self.dtype), self._zeros(shape, self.dtype)) for shape in self._shapes]


class PageMajorTokenToKVPool(MHATokenToKVPool):
    """The same, page-major: each head's tokens of a page lie together. It stores by plain torch; a package that has a kernel
    for this layout overrides `store`."""

    layout: ClassVar[str] = PAGE_MAJOR

    def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
        """Two indexed writes."""
        self.write_cells(layer_id, out_cache_loc, key, value)

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Two indexed reads."""
        pages, places = cells // self.page_size, cells % self.page_size
        keys, values = self._kv[layer_id]
        return keys.transpose(1, 2)[pages, places], values.transpose(1, 2)[pages, places]

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Two indexed writes."""
        where = cells // self.page_size, cells % self.page_size
        for held, new in zip(self._kv[layer_id], (keys, values), strict=True):
            held.transpose(1, 2)[where] = new.to(held.dtype)

    def _shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        return self.num_cells // self.page_size, heads, self.page_size, head_dim


def _torch_zeros(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def cell_bytes(layers: LayerShapes, dtype: torch.dtype) -> int:
    """Bytes of one token's KV over all layers: 2 * kv_heads * head_dim * element size, summed."""
    return sum(2 * heads * head_dim for heads, head_dim in layers) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PoolKind:
    """How a device keeps keys and values. `make_pool(num_pages, page_size, layers, dtype, device, kernels)` allocates them for
    a model that is computed in `dtype`; `cell_bytes(layers, dtype)` are those of one token over all layers;
    `kv_cache_dtype` is what a configuration asks for to have them."""

    make_pool: Callable[[int, int, LayerShapes, torch.dtype, str, KernelTable], TokenToKVPool]
    cell_bytes: Callable[[LayerShapes, torch.dtype], int]
    kv_cache_dtype: str = "auto"


PER_HEAD = PoolKind(MHATokenToKVPool, cell_bytes)
"""In the model's type, by head, cell-major."""
PER_HEAD_BY_PAGE = PoolKind(PageMajorTokenToKVPool, cell_bytes)
"""The same, page-major."""
POOL_KINDS: Mapping[str, PoolKind] = MappingProxyType({CELL_MAJOR: PER_HEAD, PAGE_MAJOR: PER_HEAD_BY_PAGE})
"""By layout."""
