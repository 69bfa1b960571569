"""The checking worker for prefill in layer slices: KV cells and states appear with the last slice
only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sglcore.worker.model_worker import BatchResult, Ticket
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch, offsets_of
from tests.schedule.fake_worker import NOTHING, FakeWorker, InFlightStep, Slot, want


@dataclass
class Open:
    """A prefill with `done` layers run: its result, its slots, and the values that appear with the
    last layer."""

    batch: ScheduleBatch
    result: BatchResult
    slots: dict[int, Slot]
    last_tokens: dict[int, int]
    written: list[np.ndarray]
    cells: list[np.ndarray]
    windows: list[np.ndarray]
    window_cells: list[np.ndarray]
    snapshots: dict[int, int]
    done: int = 0


class FakeSlicedWorker(FakeWorker):
    """The pages and slots of an open prompt are in use from its first slice to its last."""

    open: Open | None = None
    slices: list[tuple[int, int]]

    def submit(self, batch: ScheduleBatch) -> Ticket:
        if batch.layers is None:
            return super().submit(batch)
        self.modes.append(batch.forward_mode)
        self.seen.append(batch)
        if batch.step in self.fail_submit:
            self._spoil_states(batch if self.open is None or batch.batch_size else self.open.batch)
            self.open = None
            raise RuntimeError(f"planned failure of submit {batch.step}")
        first, last = batch.layers.tolist()
        self.slices = [*vars(self).get("slices", []), (first, last)]
        want(0 <= first < last <= self.limits.sliced_layers, f"layers {first} to {last}")
        want(batch.forward_mode is ForwardMode.EXTEND, "layers of what is no prompt")
        self._check_room(batch)
        if first == 0:
            self._begin(batch)
        return self._go_on(batch, last)

    def _begin(self, batch: ScheduleBatch) -> None:
        self._check_shape(batch)
        self._written, self._windows = [], []
        places = [] if batch.state_to is None else batch.state_to[batch.state_to != 0].tolist()
        result = self._run(batch)
        slots = {int(slot): self.slots[slot] for slot in batch.slots}
        self.open = Open(
            batch,
            result,
            slots,
            {number: slot.last_token for number, slot in slots.items()},
            self._written,
            [self.cells[each].copy() for each in self._written],
            self._windows,
            [self.window_cells[each].copy() for each in self._windows],
            {place: self.snapshots[place] for place in places},
        )
        self._hide(self.open)

    def _hide(self, found: Open) -> None:
        for slot in found.slots.values():
            slot.last_token = NOTHING
        for places in found.written:
            self.cells[places] = NOTHING
        for places in found.windows:
            self.window_cells[places] = NOTHING
        for place in found.snapshots:
            self.snapshots[place] = NOTHING

    def _go_on(self, batch: ScheduleBatch, last: int) -> Ticket:
        found = self.open
        assert found is not None and batch.layers is not None, "a slice of no prompt"
        want(batch.layers[0] == found.done, f"a slice from layer {batch.layers[0]}, {found.done} have run")
        want(batch.batch_size == (0 if found.done else found.batch.batch_size), "a later slice with rows")
        for number, slot in found.slots.items():
            want(self.slots[number] is slot, f"slot {number} was given away while its layers run")
        for places in found.written:
            self.writer[places // self.limits.page_size] = batch.step
        for places in found.windows:
            self.window_writer[places // self.limits.page_size] = batch.step
        found.done = last
        none = np.zeros(0, dtype=np.int32)
        result = BatchResult(batch.step, offsets_of(none), none, np.zeros(0, dtype=bool))
        if last == self.limits.sliced_layers:
            result, self.open = self._end(batch, found), None
        touched = {number: set(slot.pages) for number, slot in found.slots.items() if number}
        kept = {name: getattr(batch, name).copy() for name in ("slots", "seq_lens", "input_ids", "new_pages", "layers")}
        written = found.written, found.windows
        self.in_flight.append(InFlightStep(batch.step, result, touched, *written, batch, kept))
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return Ticket(batch.step, result)

    def _end(self, batch: ScheduleBatch, found: Open) -> BatchResult:
        for number, token in found.last_tokens.items():
            found.slots[number].last_token = token
        for places, cells in zip(found.written, found.cells, strict=True):
            want((self.cells[places] == NOTHING).all(), "somebody wrote in pages whose layers run")
            self.cells[places] = cells
        for places, cells in zip(found.windows, found.window_cells, strict=True):
            want((self.window_cells[places] == NOTHING).all(), "somebody wrote in window pages whose layers run")
            self.window_cells[places] = cells
        for place, state in found.snapshots.items():
            self.snapshots[place] = state
        return replace(found.result, step=batch.step)
