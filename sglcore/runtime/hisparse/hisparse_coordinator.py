"""Brings KV rows from host memory to attention on the device.

A decode step swaps in the rows that it chose; a prefill step gathers the rows of its requests that
are not on the device yet. The pool has all rows, by pages, so that prefix hits, preemption and
aborts work on pages only. Each request slot caches the rows that it used last; the cached rows of
an earlier request are invalid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.runtime.attention.sparse.host_rows import ALL, HostRows
from sglcore.runtime.attention.sparse.token_queries import TokenRows
from sglcore.runtime.hisparse.hisparse_caches import SlotCaches
from sglcore.runtime.hisparse.hisparse_loads import Loads, LoadStream, without_newest
from sglcore.runtime.hisparse.hisparse_staging import Staged, StagingRooms, decode_rows, plan_parts
from sglcore.step.held_prompt import HeldPrompt
from sglcore.step.hisparse_config import StepSwaps

if TYPE_CHECKING:
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.hisparse.hisparse_shape import SwapShape
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.memory.kv_rows import RowPool
    from sglcore.runtime.memory.pools import ReqToTokenPool
    from sglcore.worker.schedule_batch import ScheduleBatch


@dataclass(slots=True)
class Swapped:
    """The `HostRows` of a decode step.

    `table` int32 [1, P] and `owners` int32 [T], all 0, name rows by their positions in the text.
    `loads` are the rows that the last choice needs from the host. `passes` is that of
    `SlotCaches.begin`; None: every row is of another request. `is_second`: it is of the second
    micro-batch of a step.
    """

    table: Tensor
    owners: Tensor
    hisparse: HiSparseCoordinator
    loads: Loads | None = None
    passes: Tensor | None = None
    is_second: bool = False

    def before_store(self, layer_id: int) -> None:
        """Implements `HostRows.before_store`."""
        if self.loads is not None:
            self.hisparse.before_store(layer_id, self.loads)

    def choose(self, layer_id: int, chosen: Tensor, tokens: TokenRows, places: Tensor | None) -> Tensor:
        """Return int32 [T, K]: the entries that an indexer chose, as rows of the tensor of `read`,
        and start the copies of those that the device does not have. Call once per layer and step,
        after the step's rows of this layer are stored. Runs inside graphs.
        """
        if self.hisparse.has_passes:
            if self.hisparse.caches.is_first(layer_id):
                self.passes = self.hisparse.caches.begin(tokens, self.is_second)
            assert self.passes is not None
            rows, self.loads = self.hisparse.swap_in_passes(layer_id, chosen, self.passes, self.is_second)
        else:
            rows, self.loads = self.hisparse.swap_in(layer_id, chosen, tokens.slots, places, self.is_second)
        return rows

    def read(self, layer_id: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield all tokens once, with the layer's device buffer of all slots, in which the rows
        that `choose` returned are numbered; valid until the next choice.

        Call once per layer and step, after the step's rows are stored. Runs inside graphs.
        """
        assert self.loads is not None
        yield ALL, self.hisparse.load(layer_id, self.loads)


@dataclass(slots=True)
class Mixed:
    """The `HostRows` of a step with decode rows, the first `count` requests, before prompt chunks:
    those choose and read as in `swapped`, these as in `staged`, which names the rows of both.
    """

    count: int
    swapped: Swapped
    staged: Staged

    @property
    def table(self) -> Tensor:
        """int32 [B, P]: positions in the text for decode rows, pages of a room for the others."""
        return self.staged.table

    @property
    def owners(self) -> Tensor:
        """int32 [T]: each token's row of `table`."""
        return self.staged.owners

    def before_store(self, layer_id: int) -> None:
        """Implements `HostRows.before_store`."""
        self.swapped.before_store(layer_id)

    def choose(self, layer_id: int, chosen: Tensor, tokens: TokenRows, places: Tensor | None) -> Tensor:
        """Implements `HostRows.choose`: swaps in what the decode rows chose."""
        count = self.count
        places = None if places is None else places[:count]
        first = TokenRows(tokens.slots[:count], tokens.lens[:count], tokens.most)
        rows = self.swapped.choose(layer_id, chosen[:count], first, places)
        return torch.cat((rows, chosen[count:]))

    def read(self, layer_id: int) -> Iterator[tuple[slice, Tensor]]:
        """Implements `HostRows.read`: the decode rows first."""
        for _, buffer in self.swapped.read(layer_id):
            yield slice(0, self.count), buffer
        yield from self.staged.read(layer_id)


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
        """Allocates the buffers of the shape for every slot of the page table."""
        self.shape, self.req_to_token_pool = shape, req_to_token_pool
        slots, device = len(req_to_token_pool.page_table), req_to_token_pool.page_table.device
        self._stores = {layer_id: token_to_kv_pool.rows(layer_id, name) for layer_id, name in shape.names.items()}
        # Of their own each: copies of decode steps do not wait for those of a prompt beside them.
        of_decode, of_prompts = (torch.Stream(device) if shape.rooms > 1 else None for _ in range(2))
        self.caches, self._sizes = SlotCaches(shape, req_to_token_pool, kernels), shape.sizes
        width, dtype = shape.kept.row.shape[1], shape.kept.row.dtype
        self._buffers = {
            layer_id: torch.zeros(slots * shape.buffer_rows, width, dtype=dtype, device=device)
            for layer_id in shape.names
        }
        self._loads = LoadStream(self._stores, self._buffers, shape.readers, kernels.copy_rows, of_decode)
        sizes = shape.room_rows, device, kernels.copy_rows, of_prompts, shape.held_rows
        self._rooms = StagingRooms(self._stores, *sizes)
        self.held_prompt, self._staged_rows = HeldPrompt(shape.held_pages * shape.page_size), 0
        self._decodes = 0
        self._places = torch.arange(shape.pages, dtype=torch.int32, device=device).unsqueeze(0)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on the device for slots and staging rooms."""
        buffers = sum(each.nbytes for each in self._buffers.values())
        return self.caches.num_bytes + buffers + self._rooms.num_bytes

    @property
    def has_passes(self) -> bool:
        """Whether decode steps may have several rows of a request."""
        return self.shape.most > 1

    def plan(self, batch: ForwardBatch) -> HostRows:
        """Implements `RowsOnHost.plan`; starts the first copies of a prefill."""
        if batch.extend_seq_lens is None or not batch.num_tokens:
            return self.capture_plan(batch.num_tokens)
        where, decodes = (self.req_to_token_pool, self.shape.rows_per_page), decode_rows(batch)
        staged = plan_parts(batch, *where, self._rooms, self.held_prompt.now, decodes)
        self._staged_rows, self._decodes = staged.num_rows, decodes
        self._rooms.begin(staged)
        return Mixed(decodes, self.capture_plan(decodes), staged) if decodes else staged

    def capture_plan(self, num_tokens: int) -> Swapped:
        """Return the plan of any decode step of `num_tokens` tokens."""
        owners = torch.zeros(num_tokens, dtype=torch.int32, device=self._places.device)
        return Swapped(self._places, owners, self)

    def swap_in(
        self, layer_id: int, chosen: Tensor, slots: Tensor, places: Tensor | None, is_second: bool = False
    ) -> tuple[Tensor, Loads]:
        """Return device rows int32 [T, K] of the chosen entries, and the loads of missing ones,
        which are started.

        The loads hold for this layer and the layers after it without an indexer. `slots` int32 [T];
        `places` int [T] are the rows in the host's pool that the step stores, None if it stores
        other ones.
        """
        rows, copies = self.caches.swap_in(layer_id, chosen, slots, is_second)
        is_ahead = places is not None and self._loads.runs_ahead(layer_id)
        loads = without_newest(copies[0], places) if places is not None and is_ahead else Loads(copies)
        self._loads.start(layer_id, loads)
        return rows, loads

    def swap_in_passes(
        self, layer_id: int, chosen: Tensor, passes: Tensor, is_second: bool = False
    ) -> tuple[Tensor, Loads]:
        """Do the same for a step with several rows per request; `passes` is that of
        `SlotCaches.begin`. Nothing is copied ahead, because a row may choose what another stores.
        """
        rows, copies = self.caches.swap_in_passes(layer_id, chosen, passes, is_second)
        loads = Loads(copies)
        self._loads.start(layer_id, loads)
        return rows, loads

    def before_store(self, layer_id: int, loads: Loads) -> None:
        """Order what the layer stores next after the copies that `loads` began for it."""
        self._loads.before_store(layer_id, loads)

    def load(self, layer_id: int, loads: Loads) -> Tensor:
        """Return the buffer of a layer, [slots * rows per slot, size] of all slots, with the rows
        that `swap_in` found missing. Call after the step's rows of the layer are stored; the host
        does not wait.
        """
        return self._loads.finish(layer_id, loads)

    def second(self) -> SecondHalf:
        """Return what plans the second micro-batches of decode steps."""
        return SecondHalf(self)

    def count(self, batch: ScheduleBatch, width: int | None = None) -> StepSwaps[Tensor]:
        """Return the swap statistics of the step that was just queued, with `width` rows per
        request if it verified draft tokens.

        Once per step; does not wait.
        """
        if width is not None:
            return StepSwaps(self._sizes, 0, 0, 0, self.caches.take_counts())
        is_decode = batch.forward_mode.is_decode
        rows, staged = (batch.batch_size, 0) if is_decode else (self._decodes, self._staged_rows)
        missed = self.caches.take_counts()[: len(self.shape.indexers)] if rows else None
        return StepSwaps.of(self._sizes, batch, staged, rows, missed)

    def enter(self, slots: Tensor) -> None:
        """Invalidate the cached rows of slots int32 [N], which now belong to new requests.

        Does not wait.
        """
        self.caches.enter(slots)


@dataclass(frozen=True, slots=True)
class SecondHalf:
    """The `RowsOnHost` of the second micro-batches of decode steps. Prompts are never split."""

    whole: HiSparseCoordinator

    def plan(self, batch: ForwardBatch) -> Swapped:
        """Implements `RowsOnHost.plan`. Raises ValueError for a prefill."""
        if batch.extend_seq_lens is not None and batch.num_tokens:
            raise ValueError("found a prefill in the second of two micro-batches; wanted prompts whole")
        return self.capture_plan(batch.num_tokens)

    def capture_plan(self, num_tokens: int) -> Swapped:
        """Implements `RowsOnHost.capture_plan`."""
        return replace(self.whole.capture_plan(num_tokens), is_second=True)

    def count(self, batch: ScheduleBatch, width: int | None = None) -> StepSwaps[Tensor]:
        """Implements `RowsOnHost.count`, for the whole step."""
        return self.whole.count(batch, width)

    def second(self) -> SecondHalf:
        """Return itself."""
        return self
