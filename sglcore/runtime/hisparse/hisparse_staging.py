"""Stages the rows of a prefill step on the device, one layer and some requests at a time.

A step reads one (layer, part) after another. While it reads one, the older rows of the next one are
copied into another room, on a copy stream if the device has streams. The rows that this step stores
follow once they are written. A prompt that takes several steps has a room of its own in each layer
(`HeldPrompt`), which keeps its rows from step to step, so that none is copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.worker.schedule_batch import ForwardMode

if TYPE_CHECKING:
    from sglcore.runtime.attention.sparse.token_queries import TokenRows
    from sglcore.runtime.forward_batch import ForwardBatch
    from sglcore.runtime.memory.pools import ReqToTokenPool
    from sglcore.step.held_prompt import Held

CopyRows = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""The type of the kernel table's `copy_rows`."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Rows to copy from one pool to another, as the kernel table's `copy_rows` takes them.

    `loads` int32 [2, B, N]: row loads[0, b, i] of the source goes to row loads[1, b, i] of the
    target, for i < counts[b], int32 [B].
    """

    loads: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Some requests of a step: their tokens and their rows.

    `old` are rows on pages that were complete before the step and are not in the room yet, `new`
    those of the pages after them. `is_held`: the part is the held prompt, which has rooms of its
    own.
    """

    tokens: slice
    old: Copies
    new: Copies
    is_held: bool = False

    @property
    def num_rows(self) -> int:
        """Rows that are copied from the host for each layer."""
        return self.old.loads.shape[2] + self.new.loads.shape[2]


@dataclass(frozen=True, slots=True)
class Staged:
    """The `HostRows` of a prefill step: its parts, and how chosen rows are named.

    `table` int32 [B, P] has the pages of each request in a staging room; `owners` int32 [T] is each
    token's row of it.
    """

    table: Tensor
    owners: Tensor
    parts: Sequence[Part]
    rooms: StagingRooms

    @property
    def num_rows(self) -> int:
        """Rows that the step copies from the host for each layer."""
        return sum(part.num_rows for part in self.parts)

    def before_store(self, layer_id: int) -> None:
        """Implements `HostRows.before_store`: no copy reads the rows that this step stores."""

    def choose(self, layer_id: int, chosen: Tensor, tokens: TokenRows, places: Tensor | None) -> Tensor:
        """Implements `HostRows.choose`: return `chosen` int32 [T, K] itself, because `table` names
        the rows of a room.
        """
        return chosen

    def read(self, layer_id: int) -> Iterator[tuple[slice, Tensor]]:
        """Implements `HostRows.read`: yield, part by part, the tokens of a layer and the room with
        their rows.
        """
        return self.rooms.read(layer_id, self)


def decode_rows(batch: ForwardBatch) -> int:
    """Return how many requests of a step decode; they come first. The others are prompt chunks."""
    lengths = batch.extend_seq_lens_cpu
    if batch.forward_mode is not ForwardMode.MIXED or lengths is None:
        return 0
    # A chunk of one token right after them may be read as they are.
    return int(np.append(lengths != 1, True).argmax())


def plan_parts(
    batch: ForwardBatch,
    pool: ReqToTokenPool,
    rows_per_page: int,
    rooms: StagingRooms,
    held: Held | None = None,
    decodes: int = 0,
) -> Staged:
    """Split a prefill step into parts that have at most the pages of one request each. The `held`
    prompt is a part of its own. The first `decodes` requests are in no part; the table names their
    rows by positions.

    Computed on the device, in sizes that follow from host lengths; does not wait.
    """
    ends, lengths = batch.seq_lens_cpu, batch.extend_seq_lens_cpu
    assert ends is not None and lengths is not None and batch.extend_seq_lens is not None
    size, slots = pool.page_size, batch.req_pool_indices
    pages, whole = -(-ends // size), (ends - lengths) // size
    on_device = (batch.seq_lens + size - 1) // size, (batch.seq_lens - batch.extend_seq_lens) // size
    places = torch.arange(pool.max_pages, dtype=torch.int32, device=slots.device)
    parts, tokens = [], np.append(0, np.cumsum(lengths))
    bases = [torch.zeros(decodes, dtype=torch.int32, device=slots.device)]
    for first, last in _runs(pages, pool.max_pages, decodes, None if held is None else held.row):
        has, had = (each[first:last] for each in on_device)
        base = 1 + has.cumsum(0, dtype=torch.int32) - has
        rows = _PageRows(pool.page_table, slots[first:last], base, rows_per_page)
        is_held = held is not None and held.row == first
        there = held.tokens // size if held is not None and is_held else 0
        old = rows.copies(torch.full_like(had, there), had - there, int(whole[first:last].sum()) - there)
        new = rows.copies(had, has - had, int((pages - whole)[first:last].sum()))
        parts.append(Part(slice(int(tokens[first]), int(tokens[last])), old, new, is_held))
        bases.append(base)
    owners = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    owners = torch.repeat_interleave(owners, batch.extend_seq_lens, output_size=batch.num_tokens)
    return Staged(torch.cat(bases).unsqueeze(1) + places, owners, parts, rooms)


def _runs(pages: NDArray[np.int32], most: int, first: int, alone: int | None) -> Iterator[tuple[int, int]]:
    """Yield the longest runs of requests, from the `first` one on, with at most `most` pages
    together, and the request `alone` in a run of its own.
    """
    total = 0
    for place, count in enumerate(pages[first:].tolist(), first):
        if place > first and (total + count > most or alone in (place, place - 1)):
            yield first, place
            first, total = place, 0
        total += count
    if first < len(pages):
        yield first, len(pages)


@dataclass(frozen=True, slots=True)
class _PageRows:
    """The pages of R requests in a page table, and their pages in a staging room: `slots` int [R]
    are the requests' slots, `base` int [R] the first page of each in the room.
    """

    table: Tensor
    slots: Tensor
    base: Tensor
    rows_per_page: int

    def copies(self, begin: Tensor, count: Tensor, total: int) -> Copies:
        """Return the copies of all rows of the pages [begin, begin + count) of each request, int32
        [R] each, counted from the request's first page.

        `total` is the number of these pages of all requests, known on the host.
        """
        device = self.slots.device
        numbers = torch.arange(len(self.slots), dtype=torch.int32, device=device)
        owner = torch.repeat_interleave(numbers, count, output_size=total)
        before = (count.cumsum(0, dtype=torch.int32) - count - begin).index_select(0, owner)
        place = torch.arange(total, dtype=torch.int32, device=device) - before
        taken = self.table[self.slots.index_select(0, owner), place]
        pages = torch.stack((taken, self.base.index_select(0, owner) + place))
        rows = torch.arange(self.rows_per_page, dtype=torch.int32, device=device)
        loads = (pages.unsqueeze(2) * self.rows_per_page + rows).view(2, 1, -1)
        return Copies(loads, torch.full((1,), loads.shape[2], dtype=torch.int32, device=device))


def wait_for(reading: torch.Stream, copying: torch.Stream) -> None:
    """Make the stream `reading` wait for the copies queued on the stream `copying`, which fill the
    room that it reads next. The host does not wait.
    """
    reading.wait_stream(copying)


def follow(copying: torch.Stream, reading: torch.Stream) -> None:
    """Make the stream `copying` wait for the work queued on the stream `reading`, after which its
    room is free and the rows are stored. The host does not wait.
    """
    copying.wait_stream(reading)


class StagingRooms:
    """Buffers on the device, called rooms, into which the rows of a prefill step are copied from
    host memory. Each has `num_rows` rows, enough for the longest request.

    All layers share two if streams let copies overlap the forward, else one. The held prompt has
    one of `held_rows` rows in each layer (0: none).
    """

    def __init__(
        self,
        stores: Mapping[int, Tensor],
        num_rows: int,
        device: torch.device,
        copy_rows: CopyRows,
        stream: torch.Stream | None,
        held_rows: int = 0,
    ) -> None:
        """`stores` are the rows [N, D] in host memory of the layers that read, by id, in layer
        order. `stream` runs the copies of older rows; None: the current stream does.
        """
        self._turns = {layer_id: turn for turn, layer_id in enumerate(stores)}
        self._stores, self._copy, self._device = tuple(stores.values()), copy_rows, device
        self._stream = stream

        def room(rows: int) -> Tensor:
            return torch.zeros(rows, self._stores[0].shape[1], dtype=self._stores[0].dtype, device=device)

        self._rooms = [room(num_rows) for _ in range(1 if stream is None else 2)]
        self._held = [room(held_rows) for _ in self._stores if held_rows]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated on the device."""
        return sum(room.nbytes for room in (*self._rooms, *self._held))

    def begin(self, staged: Staged) -> None:
        """Start the first copies of a step, after the work queued on the current stream. Does
        nothing without streams.
        """
        if self._stream is not None:
            self._start(self._stream, staged, 0)

    def read(self, layer_id: int, staged: Staged) -> Iterator[tuple[slice, Tensor]]:
        """Yield, part by part, a layer's tokens and the room with their rows.

        The room is valid until the next part. Call once per step for each layer, in order. Does not
        wait.
        """
        for place, part in enumerate(staged.parts):
            turn = self._turns[layer_id] * len(staged.parts) + place
            room, store = self._room(staged, turn), self._stores[self._turns[layer_id]]
            if self._stream is None:
                self._copy(store, room, part.old.loads, part.old.counts)
            else:
                wait_for(torch.accelerator.current_stream(self._device), self._stream)
                self._start(self._stream, staged, turn + 1)
            self._copy(store, room, part.new.loads, part.new.counts)
            yield part.tokens, room

    def _start(self, stream: torch.Stream, staged: Staged, turn: int) -> None:
        """Start copying the older rows for a turn, after the queued work that reads its room."""
        layer, place = divmod(turn, len(staged.parts))
        if layer < len(self._stores):
            follow(stream, torch.accelerator.current_stream(self._device))
            with stream:
                old = staged.parts[place].old
                self._copy(self._stores[layer], self._room(staged, turn), old.loads, old.counts)

    def _room(self, staged: Staged, turn: int) -> Tensor:
        """Return the room of a turn. Every second turn may use the same one; by then the first has
        been read.
        """
        layer, place = divmod(turn, len(staged.parts))
        return self._held[layer] if staged.parts[place].is_held else self._rooms[turn % len(self._rooms)]
