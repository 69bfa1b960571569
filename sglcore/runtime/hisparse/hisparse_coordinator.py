"""Brings KV rows from host memory to attention on the device.

A decode step swaps in the rows that it chose; a prefill step gathers all rows of its requests. The
pool has all rows, by pages, so that prefix hits, preemption and aborts work on pages only. Each
request slot caches the rows that it used last; the cached rows of an earlier request are invalid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.runtime.attention.sparse.host_rows import ALL, HostRows
from sglcore.runtime.hisparse.hisparse_staging import Copies, StagingRooms, plan_parts
from sglcore.step.hisparse_config import StepSwaps

if TYPE_CHECKING:
    from sglcore.device.batch import ScheduleBatch
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.hisparse.hisparse_shape import SwapShape
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.memory.kv_rows import RowPool
    from sglcore.runtime.memory.pools import ReqToTokenPool


@dataclass(slots=True)
class Swapped:
    """The `HostRows` of a decode step.

    `table` int32 [1, P] and `owners` int32 [T], all 0, name rows by their positions in the text.
    `copies` are the rows that the last choice needs from the host.
    """

    table: Tensor
    owners: Tensor
    hisparse: HiSparseCoordinator
    copies: Copies | None = None

    def choose(self, layer_id: int, chosen: Tensor, slots: Tensor) -> Tensor:
        """Return int32 [T, K]: the entries `chosen` by an indexer, as rows of the tensor of `read`;
        -1, for none, stays -1.

        `slots` int32 [T] has the request slot of each token. Call once per layer with an indexer
        and step, before `read`. Runs inside graphs.
        """
        rows, self.copies = self.hisparse.swap_in(layer_id, chosen, slots)
        return rows

    def read(self, layer_id: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield all tokens once, with the layer's device buffer of all slots, in which the rows
        that `choose` returned are numbered; valid until the next choice.

        Call once per layer and step, after the step's rows are stored. Runs inside graphs.
        """
        assert self.copies is not None
        yield ALL, self.hisparse.load(layer_id, self.copies)


class HiSparseCoordinator:
    """The `RowsOnHost` of the layers that read an indexer's choice. Made once; its addresses never
    change.
    """

    def __init__(
        self,
        shape: SwapShape,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: RowPool,
        kernels: KernelTable,
    ) -> None:
        """Allocates the buffers of the shape for every slot of the page table.

        `missed` int32 [indexers, slots]: rows that each token of the last decode step needed from
        the host.
        """
        self.shape, self.req_to_token_pool, self.kernels = shape, req_to_token_pool, kernels
        slots, device = len(req_to_token_pool.page_table), req_to_token_pool.page_table.device
        self._stores = {layer_id: token_to_kv_pool.rows(layer_id, name) for layer_id, name in shape.names.items()}
        self._groups = {layer_id: group for group, layer_id in enumerate(shape.indexers)}

        def table(size: int) -> Tensor:
            return torch.full((len(shape.indexers), slots, size), -1, dtype=torch.int32, device=device)

        self._held, self._order, self._where = map(table, shape.table_sizes)
        self.missed, self._sizes = table(1).squeeze(2).zero_(), shape.sizes
        self._order.copy_(torch.arange(shape.buffer_rows, dtype=torch.int32, device=device))
        width, dtype = shape.kept.row.shape[1], shape.kept.row.dtype
        self._buffers = {
            layer_id: torch.zeros(slots * shape.buffer_rows, width, dtype=dtype, device=device)
            for layer_id in shape.names
        }
        self._rooms = StagingRooms(self._stores, shape.room_rows, device, kernels.copy_rows, shape.rooms > 1)
        self._places = torch.arange(shape.pages, dtype=torch.int32, device=device).unsqueeze(0)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on the device for slots and staging rooms."""
        tables = self._held, self._order, self._where, self.missed
        return sum(each.nbytes for each in (*tables, *self._buffers.values())) + self._rooms.num_bytes

    def plan(self, batch: ForwardBatch) -> HostRows:
        """Implements `RowsOnHost.plan`; starts the first copies of a prefill."""
        if batch.extend_seq_lens is None:
            return self.capture_plan(batch.num_tokens)
        staged = plan_parts(batch, self.req_to_token_pool, self.shape.rows_per_page, self._rooms)
        self._rooms.begin(staged)
        return staged

    def capture_plan(self, num_tokens: int) -> Swapped:
        """Return the plan of any decode step of `num_tokens` tokens."""
        owners = torch.zeros(num_tokens, dtype=torch.int32, device=self._places.device)
        return Swapped(self._places, owners, self)

    def swap_in(self, layer_id: int, chosen: Tensor, slots: Tensor) -> tuple[Tensor, Copies]:
        """Return the device rows int32 [T, K] of the entries `chosen` int32 [T, K] of the request
        slots `slots` int32 [T] (-1: none), and the copies of missing ones, which `load` makes.

        The copies hold for this layer and the layers after it without an indexer. Does not wait.
        """
        group, rows = self._groups[layer_id], torch.empty_like(chosen)
        copies = Copies(chosen.new_empty(2, *chosen.shape), self.missed[group, : len(slots)])
        state = self._held[group], self._order[group], self._where[group]
        where = self.req_to_token_pool.page_table, self.shape.rows_per_page
        self.kernels.swap_in(chosen, slots, *where, *state, rows, copies.loads, copies.counts)
        return rows, copies

    def load(self, layer_id: int, copies: Copies) -> Tensor:
        """Copy the missing rows of a layer to the device and return its buffer, [slots * rows per
        slot, size], of all slots.
        """
        buffer = self._buffers[layer_id]
        self.kernels.copy_rows(self._stores[layer_id], buffer, copies.loads, copies.counts)
        return buffer

    def count(self, batch: ScheduleBatch) -> StepSwaps[Tensor]:
        """Return the swap statistics of the step that was just queued.

        Once per step; does not wait.
        """
        if not batch.forward_mode.is_decode:
            return StepSwaps.of(self._sizes, batch, None)
        missed = self.missed[:, : batch.batch_size].sum(1, dtype=torch.int32)
        return StepSwaps.of(self._sizes, batch, missed)

    def enter(self, slots: Tensor) -> None:
        """Invalidate the cached rows of slots int32 [N], which now belong to new requests.

        Does not wait.
        """
        self._held[:, slots] = -1
