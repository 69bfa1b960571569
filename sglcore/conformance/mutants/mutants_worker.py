"""Broken workers: defects on the host side of the worker interface, so that they can be planted in
any device. Most are subclasses of `Changed` with the text of the `Mutant` as docstring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from sglcore.conformance.mutant import Mutant
from sglcore.worker.model_worker import BatchResult, Limits, ModelWorker, Ticket
from sglcore.worker.schedule_batch import ScheduleBatch


class Changed:
    """A worker that passes every call on to `worker`, but changes its batches (`change`) or results
    (`changed`); the subclasses say how."""

    def __init__(self, worker: ModelWorker) -> None:
        self.worker = worker

    @property
    def limits(self) -> Limits:
        """Limits of the wrapped worker."""
        return self.worker.limits

    def submit(self, batch: ScheduleBatch) -> Ticket:
        """Apply `change` to the batch, in place, and start the step on the wrapped worker."""
        self.change(batch)
        return self.worker.submit(batch)

    def collect(self, ticket: Ticket) -> BatchResult:
        """Wait for a step of the wrapped worker; return `changed` of its result."""
        return self.changed(self.worker.collect(ticket))

    def close(self) -> None:
        """Close the wrapped worker."""
        self.worker.close()

    def change(self, batch: ScheduleBatch) -> None:
        """Change a batch in place before it is submitted; does nothing here."""

    def changed(self, result: BatchResult) -> BatchResult:
        """Return a changed copy of a collected result; here, the result itself."""
        return result


class OnePositionLate(Changed):
    """The length of a decoding row is taken as one token too short."""

    def change(self, batch: ScheduleBatch) -> None:
        if batch.forward_mode.is_decode:
            batch.seq_lens = batch.seq_lens - 1
            batch.prefix_lens = batch.prefix_lens - 1


class RestartsChunks(Changed):
    """Every chunk is taken as the beginning of its prompt."""

    def change(self, batch: ScheduleBatch) -> None:
        if not batch.forward_mode.is_decode:
            batch.prefix_lens = np.zeros_like(batch.prefix_lens)
            batch.seq_lens = np.diff(batch.token_offsets).astype(np.int32)


class OneLengthForAll(Changed):
    """The shortest decoding row has the length of the longest."""

    def change(self, batch: ScheduleBatch) -> None:
        if batch.forward_mode.is_decode:
            batch.seq_lens = np.full_like(batch.seq_lens, batch.seq_lens.max())
            batch.prefix_lens = batch.seq_lens - 1


class NeighbouringPages(Changed):
    """The pages of a row are taken to be consecutive."""

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(worker)
        self._first: dict[int, int] = {}

    def change(self, batch: ScheduleBatch) -> None:
        pages = batch.new_pages.copy()
        for row, slot in enumerate(batch.slots.tolist()):
            start, end = batch.new_page_offsets[row : row + 2].tolist()
            held = int(batch.page_counts[row])
            if end > start and not held:
                self._first[slot] = int(pages[start])
            for index in range(start, end):
                pages[index] = (self._first[slot] + held + index - start - 1) % self.limits.num_pages + 1
        batch.new_pages = pages


class KeepsRowOrder(Changed):
    """The first tokens after a change of rows come in another order."""

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(worker)
        self._slots: list[int] = []
        self._shuffled: set[int] = set()

    def change(self, batch: ScheduleBatch) -> None:
        slots = batch.slots.tolist()
        if slots != self._slots and len(slots) == len(self._slots):
            self._shuffled.add(batch.step)
        self._slots = slots

    def changed(self, result: BatchResult) -> BatchResult:
        if result.step not in self._shuffled:
            return result
        self._shuffled.discard(result.step)
        return replace(result, token_ids=np.roll(result.token_ids, 1))


class ReusesResults(Changed):
    """The token buffer of a step is reused before its ticket is collected."""

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(worker)
        self._out: list[Ticket] = []
        self._early: dict[int, BatchResult] = {}

    def submit(self, batch: ScheduleBatch) -> Ticket:
        older = [ticket for ticket in self._out if ticket.step not in self._early]
        ticket = self.worker.submit(batch)
        if self._out:
            for other in (*older, ticket):
                self._early[other.step] = self.worker.collect(other)
            for other in self._out:
                self._overwrite(other.step, self._early[ticket.step])
        self._out.append(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> BatchResult:
        self._out = [other for other in self._out if other is not ticket]
        early = self._early.pop(ticket.step, None)
        return self.worker.collect(ticket) if early is None else early

    def _overwrite(self, step: int, newest: BatchResult) -> None:
        older = self._early[step]
        if len(older.token_ids) == len(newest.token_ids):
            self._early[step] = replace(older, token_ids=newest.token_ids)


class SeedsByRow(Changed):
    """The noise of a draw depends on the row of the batch."""

    def change(self, batch: ScheduleBatch) -> None:
        sampling: Any = batch.sampling
        rows = np.arange(len(sampling), dtype=np.int32)[:, None]
        batch.sampling = replace(sampling, seed_words=sampling.seed_words + rows)


class LeavesExclusionOut(Changed):
    """Tokens that XTC excludes can be drawn."""

    def change(self, batch: ScheduleBatch) -> None:
        sampling: Any = batch.sampling
        batch.sampling = replace(sampling, xtc_chance=np.zeros_like(sampling.xtc_chance))


class KeepsOldPages(Changed):
    """A request runs on the pages of the previous request in its slot."""

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(worker)
        self._pages: dict[int, list[int]] = {}

    def change(self, batch: ScheduleBatch) -> None:
        pages = batch.new_pages.copy()
        for row, slot in enumerate(batch.slots.tolist()):
            start, end = batch.new_page_offsets[row : row + 2].tolist()
            held, old = int(batch.page_counts[row]), self._pages.get(slot, [])
            new = pages[start:end].tolist()
            if not held and new:
                reused = old[: end - start]
                pages[start : start + len(reused)] = reused
            self._pages[slot] = (self._pages.get(slot, []) if held else []) + new
        batch.new_pages = pages


class ForgetsOutputs(Changed):
    """A preempted request keeps its prompt (at most 30 tokens, as in the laws), but its output
    tokens are lost."""

    def change(self, batch: ScheduleBatch) -> None:
        ids = batch.input_ids.copy()
        for row in range(batch.batch_size) if not batch.forward_mode.is_decode else ():
            start, end = batch.token_offsets[row : row + 2].tolist()
            if end - start > 1:
                ids[start + max(30 - int(batch.prefix_lens[row]), 0) : end] = 3
        batch.input_ids = ids


class LosesSharedPages(Changed):
    """The first page that a new request shares with another is taken to be page 0."""

    def change(self, batch: ScheduleBatch) -> None:
        pages = batch.new_pages.copy()
        for row in np.flatnonzero((batch.page_counts == 0) & (batch.prefix_lens > 0)).tolist():
            pages[batch.new_page_offsets[row]] = 0
        batch.new_pages = pages


class SwapsRows(Changed):
    """The first two rows of a decode get each other's tokens."""

    def changed(self, result: BatchResult) -> BatchResult:
        if len(result.token_ids) < 2:
            return result
        tokens = result.token_ids.copy()
        tokens[:2] = tokens[1::-1]
        return replace(result, token_ids=tokens)


class LeavesMasksOut(Changed):
    """Masks are sent with the first step of a composition only."""

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(worker)
        self._composition = -1

    def change(self, batch: ScheduleBatch) -> None:
        if batch.composition == self._composition:
            batch.masks = batch.mask_rows = None
        self._composition = batch.composition


class LeavesChangesOut(Changed):
    """A step adds the last step's values to the logits, in place of its own."""

    def __init__(self, worker: ModelWorker) -> None:
        super().__init__(worker)
        self._last: tuple[Any, ...] = (None, None)

    def change(self, batch: ScheduleBatch) -> None:
        if batch.change_rows is not None:
            now = (batch.change_rows, batch.change_ids, batch.change_values)
            if self._last[0] is not None and set(self._last[0]) <= set(now[0]):
                batch.change_rows, batch.change_ids, batch.change_values = self._last
            self._last = now


class MasksTheNextRow(Changed):
    """A mask holds for the row after its own."""

    def change(self, batch: ScheduleBatch) -> None:
        if batch.mask_rows is not None:
            emitting = np.flatnonzero(batch.emits)
            batch.mask_rows = np.roll(emitting, -1)[np.searchsorted(emitting, batch.mask_rows)].astype(np.int32)


class Flatters(Changed):
    """Log-probabilities are reported half a nat too high."""

    def changed(self, result: BatchResult) -> BatchResult:
        found = result.logprobs
        return result if found is None else replace(result, logprobs=replace(found, chosen=found.chosen + 0.5))


class SwapsStates(Changed):
    """Rows with equally many hidden states get each other's."""

    def changed(self, result: BatchResult) -> BatchResult:
        swapped = dict(result.hidden_states)
        for row, states in result.hidden_states.items():
            others = [other for other, found in result.hidden_states.items() if len(found) == len(states)]
            swapped[others[others.index(row) - 1]] = states
        return replace(result, hidden_states=swapped)


class MistakesTheNorm(Changed):
    """All hidden states are those after the last norm."""

    def change(self, batch: ScheduleBatch) -> None:
        if batch.hidden_modes is not None:
            batch.hidden_modes = np.abs(batch.hidden_modes)


class Overstates(Changed):
    """The limits promise twice the pages that there are."""

    @property
    def limits(self) -> Limits:
        real = self.worker.limits
        return replace(real, num_pages=2 * real.num_pages)


def hoarding() -> Callable[[ModelWorker], ModelWorker]:
    """Return a class of workers that wrap a worker and, when they are closed, keep it alive instead
    of closing it."""
    kept: list[ModelWorker] = []

    class Hoarded(Changed):
        """A worker that is kept alive where it should be closed."""

        def close(self) -> None:
            kept.append(self)

    return Hoarded


def latest() -> Callable[[ModelWorker], ModelWorker]:
    """Return a change after which every worker of the process hands its steps to the one that was
    made last."""
    made: list[ModelWorker] = []

    class Latest(Changed):
        """Every worker of the process hands its steps to the one that was made last."""

        def __init__(self, worker: ModelWorker) -> None:
            super().__init__(worker)
            made.append(worker)

        def submit(self, batch: ScheduleBatch) -> Ticket:
            return made[-1].submit(batch)

        def collect(self, ticket: Ticket) -> BatchResult:
            return made[-1].collect(ticket)

    return Latest


def _worker(name: str, kind: Callable[[ModelWorker], Any]) -> Mutant:
    return Mutant(name=name, says=(kind.__doc__ or "").strip(), steps=MappingProxyType({"worker": kind}))


ONE_POSITION_LATE = _worker("one position late", OnePositionLate)
RESTARTS_CHUNKS = _worker("chunks restart", RestartsChunks)
ONE_LENGTH_FOR_ALL = _worker("one length for all", OneLengthForAll)
NEIGHBOURING_PAGES = _worker("pages are neighbours", NeighbouringPages)
KEEPS_ROW_ORDER = _worker("order of rows", KeepsRowOrder)
REUSES_RESULTS = _worker("result buffer reused", ReusesResults)
SEEDS_BY_ROW = _worker("seeds by row", SeedsByRow)
LEAVES_EXCLUSION_OUT = _worker("no XTC", LeavesExclusionOut)
KEEPS_OLD_PAGES = _worker("slot keeps old pages", KeepsOldPages)
FORGETS_OUTPUTS = _worker("outputs forgotten", ForgetsOutputs)
LOSES_SHARED_PAGES = _worker("shared page lost", LosesSharedPages)
SWAPS_ROWS = _worker("rows swapped", SwapsRows)
LEAVES_MASKS_OUT = _worker("masks left out", LeavesMasksOut)
LEAVES_CHANGES_OUT = _worker("old additions to logits", LeavesChangesOut)
MASKS_THE_NEXT_ROW = _worker("masks of the next row", MasksTheNextRow)
FLATTERS = _worker("flattering log-probabilities", Flatters)
SWAPS_STATES = _worker("hidden states swapped", SwapsStates)
MISTAKES_THE_NORM = _worker("hidden states after the norm", MistakesTheNorm)
OVERSTATES = _worker("limits overstated", Overstates)
LATEST_WORKER = _worker("latest worker", latest())
NEVER_CLOSES = Mutant(
    name="never closes", says="Closing frees nothing.", steps=MappingProxyType({"worker": hoarding()})
)
