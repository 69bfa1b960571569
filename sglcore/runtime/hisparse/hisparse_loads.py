"""Copies the rows that decode steps miss, on a stream of its own if the device has streams.

What can overlap follows from the model. The choice of a layer with an indexer depends on the output
of the layer before it, so its copies cannot begin earlier than its indexer has run; they run while
the layer projects its queries. Layers without an indexer read the choice of the last one before
them: their copies run while the layers between them compute. Only the row that a step itself stores
is copied when its layer has stored it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglcore.runtime.hisparse.hisparse_staging import Copies, CopyRows, follow


@dataclass(frozen=True, slots=True)
class Loads:
    """The rows that a choice needs from the host.

    `all`: in the layer that chose, whose new rows are stored before it chooses, in one or several
    pieces. For the layers after it, `older`: without the rows that this step stores, and `newest`:
    those alone; None: the layers after it have no copies ahead.
    """

    all: tuple[Copies, ...]
    older: Copies | None = None
    newest: Copies | None = None


def without_newest(copies: Copies, places: Tensor) -> Loads:
    """Split the copies int32 [2, T, K] of T requests.

    `places` int [T] is the row in the host's pool that each request stores in this step, which it
    misses once or not at all. Does not wait.
    """
    loads, counts = copies.loads, copies.counts
    is_newest = loads[0] == places.unsqueeze(1)
    missed, last = is_newest.any(1), (counts - 1).clamp(min=0).long()
    at = torch.where(missed, is_newest.int().argmax(1), last).expand(2, 1, -1).transpose(1, 2)
    last = last.expand(2, 1, -1).transpose(1, 2)
    # The last row takes the place of the newest one.
    older = Copies(loads.scatter(2, at, loads.gather(2, last)), counts - missed.int())
    return Loads((copies,), older, Copies(loads.gather(2, at), missed.int()))


def wait_for_loads(reading: torch.Stream, done: torch.Event) -> None:
    """Make `reading` wait for the copies for a layer."""
    reading.wait_event(done)


class LoadStream:
    """Copies rows from the host to the device buffers of layers, on a stream of its own."""

    def __init__(
        self,
        stores: Mapping[int, Tensor],
        buffers: Mapping[int, Tensor],
        readers: Mapping[int, Sequence[int]],
        copy_rows: CopyRows,
        stream: torch.Stream | None,
    ) -> None:
        """`stores` and `buffers` are the rows in host memory and on the device, by layer id.
        `readers`: of each layer that chooses, the layers that read its choice, itself first.
        `stream` None: the copies run on the current stream.
        """
        self._stores, self._buffers, self._readers = stores, buffers, readers
        self._copy, self._stream = copy_rows, stream
        self._done = {} if stream is None else {layer_id: torch.Event(stream.device) for layer_id in stores}

    def runs_ahead(self, layer_id: int) -> bool:
        """Return whether copies for other layers begin with those of this one, which chooses."""
        return self._stream is not None and len(self._readers[layer_id]) > 1

    def start(self, layer_id: int, loads: Loads) -> None:
        """Start the copies for a layer that chose, and for the layers that read its choice if there
        are `older` ones. They wait for the work queued on the current stream, which wrote `loads`
        and reads the buffers. Does nothing without a stream.
        """
        stream = self._stream
        if stream is None:
            return
        follow(stream, torch.accelerator.current_stream(stream.device))
        with stream:
            self._copy_on(stream, layer_id, *loads.all)
            if loads.older is not None:
                for reader in self._readers[layer_id][1:]:
                    self._copy_on(stream, reader, loads.older)

    def before_store(self, layer_id: int, loads: Loads) -> None:
        """Make the current stream wait for the copies for a layer that began ahead: they read the
        rows among which it stores.
        """
        if self._stream is not None and layer_id not in self._readers and loads.older is not None:
            self._wait(self._stream, layer_id)

    def finish(self, layer_id: int, loads: Loads) -> Tensor:
        """Return the buffer of a layer, [slots * rows per slot, size] of all slots, with the rows
        that it needs. The current stream waits for the copies; the host does not.
        """
        store, buffer, is_chooser = self._stores[layer_id], self._buffers[layer_id], layer_id in self._readers
        if self._stream is not None and is_chooser:
            self._wait(self._stream, layer_id)
            return buffer
        for copies in loads.all if loads.newest is None or self._stream is None else (loads.newest,):
            self._copy(store, buffer, copies.loads, copies.counts)
        return buffer

    def _wait(self, stream: torch.Stream, layer_id: int) -> None:
        wait_for_loads(torch.accelerator.current_stream(stream.device), self._done[layer_id])

    def _copy_on(self, stream: torch.Stream, layer_id: int, *all_copies: Copies) -> None:
        for copies in all_copies:
            self._copy(self._stores[layer_id], self._buffers[layer_id], copies.loads, copies.counts)
        self._done[layer_id].record(stream)
