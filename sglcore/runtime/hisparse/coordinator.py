"""Between rows in host memory and attention on the device: what a decode step chose is swapped in, and a prompt's step gets the
rows of its requests whole.

All rows are in the pool, by the pages of all tokens, so that prefix hits, retraction and aborts are those of pages and know
nothing of this. A slot has room for the rows that it read last; what a request leaves there counts for nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.runtime.hisparse.staging import Staged, StagingRooms, plan_parts
from sglcore.runtime.memory.rows import INDEX_KEYS, swapped_rows

if TYPE_CHECKING:
    from sglcore.runtime.attention.layer import Attention
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.memory.pools import ReqToTokenPool
    from sglcore.runtime.memory.rows import RowPool

HISPARSE = "hisparse"
"""What layers whose rows lie in host memory ask of a backend."""
ALL = slice(None)


@dataclass(slots=True)
class Swapped:
    """A decode step: `table` int32 [1, P] and `owners` int32 [T], all 0, name rows by their places in the text. `loads` and `counts`
    are what the last choice needs from the host, as `copy_rows` takes it."""

    table: Tensor
    owners: Tensor
    loads: Tensor | None = None
    counts: Tensor | None = None


HostRows = Swapped | Staged
"""Where a forward finds rows that lie in host memory; its `table` and `owners` say by which names it chooses them."""


class HiSparseCoordinator:
    """Of the layers that read what an indexer chooses, their own or that of a layer before. Made once; its addresses never change."""

    def __init__(
        self,
        layers: Sequence[Attention],
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: RowPool,
        kernels: KernelTable,
        buffer_rows: int,
        max_requests: int,
        has_streams: bool,
    ) -> None:
        """`buffer_rows` of each request and layer stay on the device."""
        self.req_to_token_pool = req_to_token_pool
        self.buffer_rows, self.kernels = buffer_rows, kernels
        device, slots = req_to_token_pool.page_table.device, max_requests + 1
        named = {layer.layer_id: name for layer in layers if (name := swapped_rows(layer.rows)) is not None}
        (kept,) = {layer.rows[named[layer.layer_id]] for layer in layers if layer.layer_id in named}
        self._rows_per_page = kept.count(req_to_token_pool.page_size)
        self._stores = {layer_id: token_to_kv_pool.rows(layer_id, name) for layer_id, name in named.items()}
        indexers = [layer.layer_id for layer in layers if layer.layer_id in named and INDEX_KEYS in layer.rows]
        self._groups = {layer_id: group for group, layer_id in enumerate(indexers)}
        entries = req_to_token_pool.max_pages * self._rows_per_page

        def table(size: int) -> Tensor:
            return torch.full((len(indexers), slots, size), -1, dtype=torch.int32, device=device)

        self._held, self._where = table(buffer_rows), table(entries + 1)
        self._order = table(buffer_rows).copy_(torch.arange(buffer_rows, dtype=torch.int32, device=device))
        width, dtype = kept.row.shape[1], kept.row.dtype
        self._buffers = {
            layer_id: torch.zeros(slots * buffer_rows, width, dtype=dtype, device=device) for layer_id in named
        }
        rows = entries + self._rows_per_page
        self._rooms = StagingRooms(self._stores, rows, device, kernels.copy_rows, has_streams)
        self._places = torch.arange(req_to_token_pool.max_pages, dtype=torch.int32, device=device).unsqueeze(0)

    def plan(self, batch: ForwardBatch) -> HostRows:
        """For one forward, and the first copies of a prompt's."""
        if batch.extend_seq_lens is None:
            return self.capture_plan(batch.num_tokens)
        staged = plan_parts(batch, self.req_to_token_pool, self._rows_per_page)
        self._rooms.begin(staged)
        return staged

    def capture_plan(self, num_tokens: int) -> Swapped:
        """Of any decode step of so many tokens."""
        return Swapped(self._places, torch.zeros(num_tokens, dtype=torch.int32, device=self._places.device))

    def choose(self, layer_id: int, chosen: Tensor, slots: Tensor, plan: HostRows) -> Tensor:
        """int32 [T, K]: what the indexer of a layer chose, by the plan's names, of tokens of slots int32 [T], as rows of what `read`
        gives. Once a layer and step. Runs inside graphs."""
        if isinstance(plan, Staged):
            return chosen
        group, rows = self._groups[layer_id], torch.empty_like(chosen)
        plan.loads = chosen.new_empty(2, *chosen.shape)
        plan.counts = torch.empty_like(slots)
        state = self._held[group], self._order[group], self._where[group]
        where = self.req_to_token_pool.page_table, self._rows_per_page
        self.kernels.swap_in(chosen, slots, *where, *state, rows, plan.loads, plan.counts)
        return rows

    def read(self, layer_id: int, plan: HostRows) -> Iterator[tuple[slice, Tensor]]:
        """Tokens of a forward and the rows that were chosen for them on the device, until the next are asked for. Once a layer
        and step, when all of the step is stored. Runs inside graphs of decode steps."""
        if isinstance(plan, Staged):
            yield from self._rooms.read(layer_id, plan)
            return
        assert plan.loads is not None and plan.counts is not None
        buffer = self._buffers[layer_id]
        self.kernels.copy_rows(self._stores[layer_id], buffer, plan.loads, plan.counts)
        yield ALL, buffer

    def enter(self, slots: Tensor) -> None:
        """Slots int32 [N] are given to requests, none of whose rows is on the device. Does not wait."""
        self._held[:, slots] = -1


def rows_read(
    hisparse: HiSparseCoordinator | None, plan: HostRows | None, layer: Attention, rows: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Tokens and what they read of a layer: all of `rows`, which are on the device, or what `HiSparseCoordinator.read` gives."""
    if hisparse is None or plan is None or swapped_rows(layer.rows) is None:
        yield ALL, rows
    else:
        yield from hisparse.read(layer.layer_id, plan)


def names_of(plan: HostRows | None) -> tuple[Tensor, Tensor] | None:
    """As `choose_rows` takes them."""
    return None if plan is None else (plan.table, plan.owners)
