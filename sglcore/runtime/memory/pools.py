"""KV memory on the device: a page table by request slot, and KV slots by layer.

Slot 0 and page 0 are reserved for padding rows, so that padding never touches a request's data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.kernels import reference_kernels
from sglcore.step.tables import Entries, new_pages, new_window_pages
from sglcore.worker.schedule_batch import ScheduleBatch

if TYPE_CHECKING:
    from sglcore.runtime.kernels.table import KernelTable

CELL_MAJOR = "cell_major"
"""Separate keys and values, each [cells, kv_heads, head_dim].

The layout of the kernel table's store entries.
"""
PAGE_MAJOR = "page_major"
"""Separate keys and values, each [pages, kv_heads, page_size, head_dim]."""

LayerShapes: TypeAlias = tuple[tuple[int, int], ...]
"""(kv_heads, head_dim) of each layer; 0 heads if the pool keeps nothing of a layer."""


def pages_of(max_model_len: int, page_size: int) -> int:
    """Return the entries of a slot in the page table, for requests of at most `max_model_len`
    tokens: one more than their pages.
    """
    return -(-max_model_len // page_size) + 1


class ReqToTokenPool:
    """The page table: the pages of each slot's tokens.

    `page_table` int32[slots + 1, pages per request] is on the device. A `SlotTable`.
    """

    names: ClassVar[tuple[str, str]] = ("page_entries", "new_pages")
    """The names of the changed entries and of their pages among a step's arrays."""

    def __init__(self, max_requests: int, max_model_len: int, page_size: int, device: str) -> None:
        self.page_size = page_size
        self.max_pages = pages_of(max_model_len, page_size)
        self.page_table = torch.zeros(max_requests + 1, self.max_pages, dtype=torch.int32, device=device)

    @property
    def max_tokens(self) -> int:
        """Tokens that a slot can hold."""
        return self.max_pages * self.page_size

    def changes(self, batch: ScheduleBatch) -> Mapping[str, NDArray[np.int32]]:
        """Return the page-table changes of a step, by the two `names`: flat entries int32[N] (slot
        * pages per request + column), and their pages int32[N].

        Empty if there are none. Raises ValueError if a request has more pages than its row holds.
        """
        entries = self._new_entries(batch)
        if entries is None:
            return {}
        slots, columns, pages = entries
        most = int(columns.max()) + 1
        if most > self.max_pages:
            raise ValueError(f"a row of step {batch.step} has {most} pages, its slot holds {self.max_pages}")
        return dict(zip(self.names, (slots * np.int32(self.max_pages) + columns, pages), strict=True))

    def apply(self, arrived: Mapping[str, Tensor]) -> None:
        """Write the result of `changes`, once it is on the device. Does not wait."""
        entries, pages = self.names
        if pages in arrived:
            self.write(arrived[entries], arrived[pages])

    def write(self, entries: Tensor, pages: Tensor) -> None:
        """Write pages int32[N] at flat entries int32[N] of the table. Does not wait."""
        self.page_table.view(-1).scatter_(0, entries, pages)

    def _new_entries(self, batch: ScheduleBatch) -> Entries | None:
        return new_pages(batch)


class WindowTable(ReqToTokenPool):
    """The page table of sliding-window pages.

    A slot's first page is the one that holds the token `ScheduleBatch.window_starts`.
    """

    names: ClassVar[tuple[str, str]] = ("window_entries", "window_pages")

    def __init__(self, max_requests: int, window: int, max_batch_tokens: int, page_size: int, device: str) -> None:
        """Size a slot for what a step of `max_batch_tokens` tokens sees, at any page alignment."""
        super().__init__(max_requests, window + max_batch_tokens + page_size, page_size, device)

    def _new_entries(self, batch: ScheduleBatch) -> Entries | None:
        return new_window_pages(batch)


class KVPool(Protocol):
    """The KV storage of `num_layers` layers, in pages.

    `generation` changes when an address changes. `layout` names the pool's memory layout; a
    backend's facts name the layouts that it reads.
    """

    generation: int
    page_size: int
    num_cells: int
    num_layers: int
    layout: ClassVar[str]

    def kv(self, layer_id: int) -> Any:
        """Return the layer's storage in this layout, for callers that know the layout."""
        ...


class TokenToKVPool(KVPool, Protocol):
    """KV slots ("cells" in names) with keys and values per head. A forward calls `store` and `kv`
    for each layer.

    Callers that do not know the layout use `read_cells` and `write_cells`, which copy one layer's
    slots in the dtype that attention computes in.
    """

    def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
        """Store row t of key and value [T, kv_heads, head_dim] in KV slot out_cache_loc[t].

        KV slots are distinct, except that padding rows name KV slot 0. Runs inside graphs; no host
        reads.
        """
        ...

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of KV slots int [N], each a new tensor [N, kv_heads, head_dim].

        The dtype is the one that attention computes in. Runs inside graphs.
        """
        ...

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [N, kv_heads, head_dim] to distinct KV slots, cast to what the pool
        stores. No other KV slot changes.
        """
        ...


class MHATokenToKVPool:
    """The `TokenToKVPool` of multi-head or grouped-query attention, cell-major.

    One pair of tensors, keys and values, per layer.
    """

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
        """`layers` has (kv_heads, head_dim) of each layer; page 0 is added to `num_pages`.

        `kernels`: the table with the `store_kv` to use (None: the reference). `zeros(shape, dtype)`
        allocates KV slots (None: torch.zeros, which writes all of them at once).
        """
        self.generation = 0
        self.page_size = page_size
        self.num_cells = (num_pages + 1) * page_size
        self.num_layers = len(layers)
        self.dtype = dtype
        self._store_kv = reference_kernels.store_kv if kernels is None else kernels.store_kv
        self._zeros = zeros or partial(_torch_zeros, device)
        self._shapes = [self._shape(heads, head_dim) for heads, head_dim in layers]
        self._kv = self._allocate()

    def kv(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """Return the layer's keys and values, not copies: each [cells, kv_heads, head_dim] in this
        layout.
        """
        return self._kv[layer_id]

    def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
        """Implements `TokenToKVPool.store` with the kernel table's `store_kv`: key and value [T,
        kv_heads, head_dim] to KV slots int [T].
        """
        self._store_kv(key, value, *self._kv[layer_id], out_cache_loc)

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `TokenToKVPool.read_cells` by a gather: cells int [N] to two copies [N,
        kv_heads, head_dim].
        """
        keys, values = self._kv[layer_id]
        return keys.index_select(0, cells), values.index_select(0, cells)

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Implements `TokenToKVPool.write_cells` with the reference's `store_kv`: write keys and
        values [N, kv_heads, head_dim] to cells int [N].
        """
        reference_kernels.store_kv(keys, values, *self._kv[layer_id], cells)

    def replace_storage(self) -> None:
        """Allocate new, zeroed memory; the contents are lost. Addresses change, so older plans and
        graphs are refused.
        """
        self._kv = self._allocate()
        self.generation += 1

    def windows(self, places: Mapping[int, tuple[int, int]], unit: int) -> Self:
        """Return a pool of sliding-window layers in the storage of this pool.

        A window page is `unit` pages of this pool, a multiple of `unit` and those after it; its
        number is that of the first. `places` has, by layer id, the layer of this pool with the
        storage and the index of the page: `{7: (2, 1)}` keeps layer 7 in the second page, in layer
        2's tensors. So all window layers have the same page numbers, each in a view of tensors that
        begins at its page. Slot 0 of the views lies in the pages below `unit`, which must not be
        used otherwise. Layers without a place have 0 heads. The views keep the storage from before
        a `replace_storage` of this pool.
        """
        made = copy(self)
        made.num_cells = self.num_cells - (unit - 1) * self.page_size
        of_page = self._shapes[0][0] * self.page_size // self.num_cells
        rows = made.num_cells * of_page // self.page_size

        def view(part: Tensor, index: int) -> Tensor:
            return part.narrow(0, index * of_page, rows)

        def views(layer: int) -> tuple[Tensor, Tensor]:
            kept, index = places.get(layer, (layer, 0))
            keys, values = self._kv[kept]
            keys, values = view(keys, index), view(values, index)
            return (keys, values) if layer in places else (keys[:, :0], values[:, :0])

        made._kv = [views(layer) for layer in range(self.num_layers)]
        return made

    def _shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        return self.num_cells, heads, head_dim

    def _allocate(self) -> list[tuple[Tensor, Tensor]]:
        return [(self._zeros(shape, self.dtype), self._zeros(shape, self.dtype)) for shape in self._shapes]


class PageMajorTokenToKVPool(MHATokenToKVPool):
    """As `MHATokenToKVPool`, in page-major layout: each head's tokens of a page are contiguous.

    It stores with plain torch; a package with a kernel for this layout overrides `store`.
    """

    layout: ClassVar[str] = PAGE_MAJOR

    def store(self, layer_id: int, key: Tensor, value: Tensor, out_cache_loc: Tensor) -> None:
        """Implements `TokenToKVPool.store` by two indexed writes, not with the kernel table's
        `store_kv`: key and value [T, kv_heads, head_dim] to KV slots int [T].
        """
        self.write_cells(layer_id, out_cache_loc, key, value)

    def read_cells(self, layer_id: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `TokenToKVPool.read_cells` by two indexed reads: cells int [N] to two copies
        [N, kv_heads, head_dim].
        """
        pages, places = cells // self.page_size, cells % self.page_size
        keys, values = self._kv[layer_id]
        return keys.transpose(1, 2)[pages, places], values.transpose(1, 2)[pages, places]

    def write_cells(self, layer_id: int, cells: Tensor, keys: Tensor, values: Tensor) -> None:
        """Implements `TokenToKVPool.write_cells` by two indexed writes: keys and values [N,
        kv_heads, head_dim] to cells int [N].
        """
        where = cells // self.page_size, cells % self.page_size
        for held, new in zip(self._kv[layer_id], (keys, values), strict=True):
            held.transpose(1, 2)[where] = new.to(held.dtype)

    def _shape(self, heads: int, head_dim: int) -> tuple[int, ...]:
        return self.num_cells // self.page_size, heads, self.page_size, head_dim


def _torch_zeros(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def cell_bytes(layers: LayerShapes, dtype: torch.dtype) -> int:
    """Return the bytes of one token over all layers.

    The sum of 2 * kv_heads * head_dim * element size.
    """
    return sum(2 * heads * head_dim for heads, head_dim in layers) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class PoolKind:
    """How a device keeps keys and values.

    `make_pool(num_pages, page_size, layers, dtype, device, kernels)` allocates them for a model
    that computes in `dtype`. `cell_bytes(layers, dtype)` are the bytes of one token over all
    layers. `kv_cache_dtype` is the configuration value that selects this kind. `windows(pool,
    places, unit)` makes the pool of sliding-window layers in the storage of another pool of this
    kind, as `MHATokenToKVPool.windows` does (None: it has storage of its own).
    """

    make_pool: Callable[[int, int, LayerShapes, torch.dtype, str, KernelTable], TokenToKVPool]
    cell_bytes: Callable[[LayerShapes, torch.dtype], int]
    kv_cache_dtype: str = "auto"
    windows: Callable[[Any, Mapping[int, tuple[int, int]], int], TokenToKVPool] | None = None


PER_HEAD = PoolKind(MHATokenToKVPool, cell_bytes, windows=MHATokenToKVPool.windows)
"""Keys and values in the model's dtype, per head, cell-major."""
PER_HEAD_BY_PAGE = PoolKind(PageMajorTokenToKVPool, cell_bytes, windows=PageMajorTokenToKVPool.windows)
"""Keys and values in the model's dtype, per head, page-major."""
POOL_KINDS: Mapping[str, PoolKind] = MappingProxyType({CELL_MAJOR: PER_HEAD, PAGE_MAJOR: PER_HEAD_BY_PAGE})
"""Pool kinds by layout."""
