"""What a worker keeps between steps: KV cells of every layer, the page table, each slot's last
token and its history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from sglcore.device.batch import ScheduleBatch
from sglcore.step.sizing import MemorySizes
from sglcore.step.tables import new_pages
from sglcore_mlx.models.contract import LayerShape
from sglcore_mlx.speculative.verify import Drafts
from sglcore_mlx.states import StatePool


def cell_bytes(layers: Sequence[LayerShape], dtype: mx.Dtype) -> int:
    """Bytes that one token takes in all layers."""
    return sum(2 * layer.num_kv_heads * layer.head_dim * dtype.size for layer in layers)


def make_cells(layers: Sequence[LayerShape], dtype: mx.Dtype, num_cells: int, fill: float) -> list[mx.array]:
    """One array a layer, [num_cells, 2, kv_heads, head_dim]: keys, then values. Allocates;
    waits."""
    cells = [mx.full((num_cells, 2, layer.num_kv_heads, layer.head_dim), fill, dtype) for layer in layers]
    mx.eval(cells)
    return cells


def store(cells: mx.array, out_cache_loc: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """`cells` with k and v [T, kv_heads, D] in the cells int32 [T]; in the same memory, if nothing
    else holds it."""
    cells[out_cache_loc] = mx.stack([k, v], axis=1).astype(cells.dtype)
    return cells


class PageTable:
    """`rows` int32 [slots + 1, pages]: the pages of each slot. On the host, because memory is the
    device's as well: a step hands over only the rows that it needs. Page 0 belongs to padding."""

    def __init__(self, sizes: MemorySizes) -> None:
        self.page_size = sizes.page_size
        self.rows = np.zeros((sizes.max_requests + 1, -(-sizes.max_model_len // sizes.page_size)), dtype=np.int32)

    def append(self, batch: ScheduleBatch) -> None:
        """Take up the pages that came with a batch, each after those that its slot has."""
        entries = new_pages(batch)
        if entries is not None:
            slots, columns, pages = entries
            self.rows[slots, columns] = pages

    def cells(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [T]: the cell of each position of its slot."""
        size = self.page_size
        return self.rows[slots, positions // size] * np.int32(size) + positions % np.int32(size)


@dataclass(slots=True)
class DeviceState:
    """Lazy arrays that one step hands to the next: `cells` of each layer, `states` of requests,
    `last` int32 [slots + 1], the token last sampled for each slot, and `history` int32 [slots + 1,
    context + 1], made when sampling first looks back. `drafts`, where tokens are proposed."""

    cells: list[mx.array]
    states: StatePool
    last: mx.array
    history: mx.array | None = None
    drafts: Drafts | None = None

    @property
    def made_history(self) -> mx.array:
        """`history`, which is there."""
        assert self.history is not None
        return self.history

    def arrays(self) -> list[mx.array]:
        """All of them."""
        history = () if self.history is None else (self.history,)
        drafts = () if self.drafts is None else (self.drafts.lengths, self.drafts.proposals)
        return [*self.cells, *self.states.arrays(), self.last, *history, *drafts]
