"""The device cache of each request slot: which entries of its KV rows are on the device, and where.

A decode step has one row per request, or several if it verifies draft tokens. Several rows of a
request swap in one after the other, each in a pass of its own, and a cache holds what all of them
read; so no pass takes the place of an entry that the step reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.runtime.hisparse.hisparse_shape import COUNTED, HALVES
from sglcore.runtime.hisparse.hisparse_staging import Copies

if TYPE_CHECKING:
    from sglcore.runtime.attention.sparse.token_queries import TokenRows
    from sglcore.runtime.hisparse.hisparse_shape import SwapShape
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.memory.pools import ReqToTokenPool


class SlotCaches:
    """The tables of all slots and indexers. Its addresses never change."""

    def __init__(self, shape: SwapShape, pool: ReqToTokenPool, kernels: KernelTable) -> None:
        """`missed` int32 [indexers, rows]: entries that each row of the last decode step needed
        from the host. `counted` int32 [2, rows] with several rows per request: entries that each
        indexer chose for a row, and those that the row completes. The first half of the rows is
        for whole steps and first micro-batches, the other for second ones.
        """
        slots, device = len(pool.page_table), pool.page_table.device
        self._shape, self._pool, self._kernels = shape, pool, kernels
        self._groups: Mapping[int, int] = {layer_id: group for group, layer_id in enumerate(shape.indexers)}

        def table(size: int) -> Tensor:
            return torch.full((len(shape.indexers), slots, size), -1, dtype=torch.int32, device=device)

        self.held, self.order, self.where = map(table, shape.table_sizes)
        self.order.copy_(torch.arange(shape.buffer_rows, dtype=torch.int32, device=device))
        rows, counted = HALVES * slots * shape.most, COUNTED if shape.most > 1 else 0
        self.missed = torch.zeros(len(shape.indexers), rows, dtype=torch.int32, device=device)
        self.counted = torch.zeros(counted, rows, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on the device."""
        return sum(each.nbytes for each in (self.held, self.order, self.where, self.missed, self.counted))

    def is_first(self, layer_id: int) -> bool:
        """Return whether a layer is the first of a step that chooses."""
        return self._groups[layer_id] == 0

    def enter(self, slots: Tensor) -> None:
        """Invalidate the entries of slots int32 [N], which now belong to new requests."""
        self.held[:, slots] = -1

    def rows_of(self, count: int, is_second: bool) -> slice:
        """Return the rows of `missed` and `counted` for a step of `count` rows, or the second half
        of one.
        """
        first = self.missed.shape[1] // HALVES if is_second else 0
        return slice(first, first + count)

    def take_counts(self) -> Tensor:
        """Return the sums of `missed` and `counted` over all rows, int32 [indexers] or [indexers +
        2], and set them to 0 for the next step. Does not wait.
        """
        tables = (self.missed, self.counted) if self._shape.most > 1 else (self.missed,)
        found = torch.cat([each.sum(1, dtype=torch.int32) for each in tables])
        for each in tables:
            each.zero_()
        return found

    def swap_in(
        self, layer_id: int, chosen: Tensor, slots: Tensor, is_second: bool
    ) -> tuple[Tensor, tuple[Copies, ...]]:
        """Return the places int32 [T, K] of chosen entries in the layer's buffer, and the copies of
        missing ones. `slots` int32 [T]: one row per request.
        """
        rows, missed = (
            torch.empty_like(chosen),
            self.missed[self._groups[layer_id], self.rows_of(len(slots), is_second)],
        )
        return rows, (self._swap_in(layer_id, chosen, slots, rows, missed),)

    def swap_in_passes(
        self, layer_id: int, chosen: Tensor, passes: Tensor, is_second: bool
    ) -> tuple[Tensor, tuple[Copies, ...]]:
        """Do the same for rows of which several belong to a request, with the result of
        `begin`.
        """
        most, tokens = passes.shape
        rows, counts = chosen.new_empty(most, *chosen.shape), chosen.new_empty(most, tokens)
        copies = tuple(self._swap_in(layer_id, chosen, *each) for each in zip(passes, rows, counts, strict=True))
        self.missed[self._groups[layer_id], self.rows_of(tokens, is_second)] = counts.sum(0, dtype=torch.int32)
        return rows.amax(0), copies

    def begin(self, tokens: TokenRows, is_second: bool) -> Tensor:
        """Begin a step with several rows per request, the rows of each next to each other.

        Forgets the entries that the step stores: they may be here as an earlier step stored them
        for a draft token that was rejected. Counts what the rows choose and complete. Returns int32
        [most, T]: the slots of the rows of each pass, 0 for rows of other passes. Does not wait.
        """
        slots, ratio = tokens.slots, self._shape.kept.ratio
        self._forget(tokens)
        is_real, rows = slots > 0, self.rows_of(len(slots), is_second)
        self.counted[0, rows] = (tokens.lens // ratio).clamp(max=self._shape.top_k) * is_real
        self.counted[1, rows] = (tokens.lens % ratio == 0) & is_real
        most = self._shape.most
        before = torch.cat((slots.new_full((most - 1,), -1), slots)).unfold(0, most, 1)[:, :-1]
        turn = (before == slots.unsqueeze(1)).sum(1, dtype=torch.int32)
        passes = torch.arange(most, dtype=torch.int32, device=slots.device).unsqueeze(1)
        return slots * (turn == passes)

    def _forget(self, tokens: TokenRows) -> None:
        """Invalidate the last entry of each row if the row completes it, for all indexers."""
        slots, lens, ratio, places = tokens.slots.long(), tokens.lens, self._shape.kept.ratio, self.held.shape[2]
        entry = (lens // ratio - 1).clamp(min=0).long()
        place = self.where[:, slots, entry].long().clamp(0, places - 1)
        at = slots * places + place
        held = self.held.view(len(self.held), -1)
        is_held = (held.gather(1, at) == entry) & (lens % ratio == 0) & (slots > 0)
        # Place 0 of slot 0 belongs to padding.
        held.scatter_(1, at.masked_fill(~is_held, 0), -1)

    def _swap_in(self, layer_id: int, chosen: Tensor, slots: Tensor, rows: Tensor, counts: Tensor) -> Copies:
        group, copies = self._groups[layer_id], Copies(chosen.new_empty(2, *chosen.shape), counts)
        state, where = (self.held[group], self.order[group], self.where[group]), self._pool.page_table
        given = chosen, slots, where, self._shape.rows_per_page, *state
        self._kernels.swap_in(*given, rows, copies.loads, copies.counts)
        return copies
