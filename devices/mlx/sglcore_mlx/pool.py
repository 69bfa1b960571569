"""The data that a worker keeps between steps: the KV cache of every layer, the page table,
recurrent states, each request slot's last token and token history, and draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore.step.sizing import MemorySizes
from sglcore.step.tables import new_pages
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.models.contract import LayerShape
from sglcore_mlx.speculative.verify import Drafts
from sglcore_mlx.states import StatePool


def cell_bytes(layers: Sequence[LayerShape], dtype: mx.Dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return sum(prod(layer.entry) * dtype.size for layer in layers)


def make_cells(layers: Sequence[LayerShape], dtype: mx.Dtype, num_cells: int, fill: float) -> list[mx.array]:
    """Allocate the KV cache and return one array for each layer, [num_cells, *entry], by the
    layer's `entry`. Every element is `fill`. Waits."""
    cells = [mx.full((num_cells, *layer.entry), fill, dtype) for layer in layers]
    mx.eval(cells)
    return cells


def store(cells: mx.array, out_cache_loc: mx.array, k: mx.array, v: mx.array | None) -> mx.array:
    """Return `cells` [KV slots, *entry] with k and v [T, kv_heads, D] at KV slots `out_cache_loc`
    int32 [T]; the array passed in may be overwritten, and must not be used again. `v` None: keys
    only, as `entry_of`."""
    return write(cells, out_cache_loc, entry_of(k, v))


def write(cells: mx.array, places: mx.array, entries: mx.array) -> mx.array:
    """As `store`, with entries [T, *entry] at KV slots `places` int32 [T]."""
    cells[places] = entries.astype(cells.dtype)
    return cells


class Writes:
    """The one write of a step to the KV cache of each layer: its own entries at KV slots
    `out_cache_loc` int32 [T], and those that the step before has left (`moved`: KV slots int32 [M],
    then by layer the entries [M, *entry]; empty: none).

    A step can not move entries after its attention: a second write would copy the cache, as MLX
    writes in place only what nothing queued reads. `entries`: the step's own, by layer.
    """

    def __init__(self, out_cache_loc: mx.array, moved: Sequence[mx.array] = ()) -> None:
        self.entries: dict[int, mx.array] = {}
        self._moved, self._places = moved[1:], out_cache_loc
        if moved:
            # A KV slot may belong to another request since; its own entry counts.
            is_free = mx.all(moved[0][:, None] != out_cache_loc[None], axis=1)
            self._places = mx.concatenate([out_cache_loc, mx.where(is_free, moved[0], 0)])

    def store(self, layer_id: int, cells: mx.array, k: mx.array, v: mx.array | None) -> mx.array:
        """As `store`, for a layer's `cells`."""
        own = self.entries[layer_id] = entry_of(k, v)
        entries = mx.concatenate([own, self._moved[layer_id].astype(own.dtype)]) if self._moved else own
        return write(cells, self._places, entries)


def entry_of(k: mx.array, v: mx.array | None) -> mx.array:
    """Return cache entries [T, 2, kv_heads, D] of keys and values, or [T, 1, kv_heads, D] of keys
    of which the values are a part."""
    return k[:, None] if v is None else mx.stack([k, v], axis=1)


class PageTable:
    """`rows` int32 [slots + 1, pages]: the pages of each request slot; entries past a request's
    pages are 0 or stale. On the host, because memory is shared: a step passes only the rows that it
    needs. Page 0, and request slot 0, are for padding."""

    def __init__(self, sizes: MemorySizes) -> None:
        self.page_size = sizes.page_size
        self.rows = np.zeros((sizes.max_requests + 1, -(-sizes.max_model_len // sizes.page_size)), dtype=np.int32)

    def append(self, batch: ScheduleBatch) -> None:
        """Write the new pages of a batch to the rows of their request slots, after the pages that
        these have; a batch without new pages changes nothing."""
        entries = new_pages(batch)
        if entries is not None:
            slots, columns, pages = entries
            self.rows[slots, columns] = pages

    def cells(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return int32 [T]: the KV slots of `positions` [T] of the request slots `slots` [T]."""
        size = self.page_size
        return self.rows[slots, positions // size] * np.int32(size) + positions % np.int32(size)


@dataclass(slots=True)
class DeviceState:
    """Lazy arrays that one step hands to the next. `cells`: the KV cache of each layer; `states`:
    the recurrent states; `last` int32 [slots + 1]: the last sampled token of each request slot;
    `history` int32 [slots + 1, context + 1]: all tokens, made when sampling first needs them;
    `drafts`: draft tokens, with speculation; `draft_cells`: the KV cache of each layer of the draft
    model, in the pages of `cells`; `moved`: entries that the next step writes, as in `Writes`."""

    cells: list[mx.array]
    states: StatePool
    last: mx.array
    history: mx.array | None = None
    drafts: Drafts | None = None
    draft_cells: list[mx.array] = field(default_factory=list)
    moved: list[mx.array] = field(default_factory=list)

    def take_moved(self) -> list[mx.array]:
        """Return `moved`, and forget it: the caller writes it."""
        moved, self.moved = self.moved, []
        return moved

    @property
    def made_history(self) -> mx.array:
        """`history`, which must have been made; raises AssertionError otherwise."""
        assert self.history is not None
        return self.history

    def arrays(self) -> list[mx.array]:
        """Return all arrays of the state as a list, so that one call evaluates them."""
        history = () if self.history is None else (self.history,)
        drafts = () if self.drafts is None else self.drafts.arrays()
        return [*self.cells, *self.draft_cells, *self.moved, *self.states.arrays(), self.last, *history, *drafts]
