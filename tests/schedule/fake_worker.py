"""A worker without a device: it keeps page tables and KV cells, and raises Violation where a device
would corrupt data.

It knows each row's true tokens (through the fake sampling state) and checks every KV cell that a
step reads. Where both kinds of pages share memory, writing one kind spoils the other's content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from sglcore.sampling.params import SamplingParams
from sglcore.schedule.cache.shared_pages import least_window_pages
from sglcore.schedule.request import Request
from sglcore.worker.model_worker import BatchResult, Limits, Ticket, TokenLogprobs
from sglcore.worker.schedule_batch import CaptureHiddenMode, ForwardMode, ScheduleBatch, offsets_of

NOTHING = -7
EMPTY = 0
"""The state before any token."""


class Violation(AssertionError):
    """A device would have computed garbage here."""


def make_params(max_tokens: int | None = 8, *, needs_history: bool = False, **given: Any) -> SamplingParams:
    """Sampling parameters, with a penalty if `needs_history`."""
    return SamplingParams(max_tokens=max_tokens, repetition_penalty=2.0 if needs_history else 1.0, **given)


def make_limits(**values: object) -> Limits:
    """Small limits; a request of max_model_len always fits."""
    defaults = {
        "max_model_len": 64,
        "max_requests": 4,
        "page_size": 4,
        "num_pages": 32,
        "max_batch_tokens": 16,
        "vocab_size": 50,
        "takes_masks": True,
    }
    return Limits(**{**defaults, **values})


class Truth:
    """A request's tokens, as a function of its seed and prompt alone."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._known: dict[Request, tuple[list[int], list[int]]] = {}

    def tokens(self, request: Request, length: int) -> list[int]:
        """The first `length` tokens: the prompt, then drawn from a hash of seed, position and all
        tokens before."""
        return self._grow(request, length)[0][:length]

    def digests(self, request: Request, length: int) -> list[int]:
        """A hash of all tokens up to each of the first `length`: the true content of its KV
        cell."""
        return self._grow(request, length)[1][:length]

    def _grow(self, request: Request, length: int) -> tuple[list[int], list[int]]:
        tokens, digests = known = self._known.setdefault(request, ([], []))
        while len(tokens) < max(length, len(request.prompt_ids)):
            place, digest = len(tokens), digests[-1] if digests else 0
            drawn = (mix(mix(digest, request.seed), place) >> 7) % self.vocab_size
            tokens.append(int(request.prompt_ids[place]) if place < len(request.prompt_ids) else drawn)
            digests.append(mix(digest, tokens[-1]))
        return known

    def output(self, request: Request, max_model_len: int) -> tuple[list[int], str]:
        """The whole output and the finish reason, as if the request ran alone."""
        prompt, most = len(request.prompt_ids), request.params.max_tokens
        end = max_model_len if most is None else min(prompt + most, max_model_len)
        output = self.tokens(request, end)[prompt:]
        for count, token in enumerate(output, start=1):
            if token in request.stop_ids:
                return output[:count], "stop"
        return output, "length"


def mix(digest: int, value: int) -> int:
    return ((digest ^ (value + 1)) * 0x100000001B3 + 0x9E3779B9) & 0xFFFFFFFFFFFF


@dataclass
class FakeSampling:
    """A sampling state that remembers the requests of its rows."""

    requests: list[Request]

    def copy_for_forward(self) -> FakeSampling:
        return FakeSampling(list(self.requests))


def compose(requests: Sequence[Request]) -> FakeSampling:
    """The fake sampling state of a batch."""
    return FakeSampling(list(requests))


@dataclass
class Slot:
    """The device's view of one slot: its request, page table, last token, number of cells, state,
    history received, window pages."""

    owner: Request | None = None
    pages: list[int] = field(default_factory=list)
    last_token: int = NOTHING
    length: int = 0
    state: int = NOTHING
    history: list[int] = field(default_factory=list)
    window_start: int = 0
    window_pages: list[int] = field(default_factory=list)


@dataclass
class InFlightStep:
    """A submitted step: its result, the pages of each of its slots, and the cells that it
    writes."""

    step: int
    result: BatchResult
    pages: dict[int, set[int]]
    written: list[np.ndarray]
    windows: list[np.ndarray]
    batch: ScheduleBatch
    snapshot: dict[str, np.ndarray]


def mask_word(request: Request, emitted: Sequence[int]) -> int:
    """The mask of a fake grammar: a hash of the request and its tokens so far, with most bits
    set."""
    digest = mix(request.seed, request.arrival)
    for token in emitted:
        digest = mix(digest, token)
    return (digest | mix(digest, 1) | mix(digest, 2)) & 0x7FFFFFFF


@dataclass
class FakeMatcher:
    """A grammar that accepts the fake worker's tokens, except the token after `refuse_after` of
    them."""

    request: Request
    refuse_after: int | None = None
    error: str = ""
    emitted: list[int] = field(default_factory=list)

    def accept(self, token_id: int) -> bool:
        if len(self.emitted) == self.refuse_after:
            self.error = "it was planned to be refused"
            return False
        self.emitted.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        del self.emitted[len(self.emitted) - count :]
        self.error = ""

    def fill(self, words: np.ndarray) -> None:
        words[:] = mask_word(self.request, self.emitted)


class FakeWorker:
    """Computes at submit, in order. `fail_submit` and `fail_collect`: numbers of the steps that
    raise; `bad_requests`: requests with bad rows."""

    def __init__(self, limits: Limits, truth: Truth | None = None) -> None:
        self.limits = limits
        self.truth = truth or Truth(limits.vocab_size)
        cells = (limits.num_pages + 1) * limits.page_size
        self.cells = np.full((cells, 1 + limits.lookahead), NOTHING, dtype=np.int64)
        self.writer = np.zeros(limits.num_pages + 1, dtype=np.int64)
        self.last_window = limits.num_pages if limits.window_unit else limits.num_window_pages
        cells = (self.last_window + 1) * limits.page_size
        self.window_cells = np.full((cells, 1 + limits.lookahead), NOTHING, dtype=np.int64)
        self.window_writer = np.zeros(self.last_window + 1, dtype=np.int64)
        self.slots = [Slot() for _ in range(limits.max_requests + 1)]
        self.snapshots = [NOTHING] * (limits.num_snapshots + 1)
        self.in_flight: list[InFlightStep] = []
        self.fail_submit: set[int] = set()
        self.fail_collect: set[int] = set()
        self.bad_requests: set[str] = set()
        self.modes: list[ForwardMode] = []
        self.seen: list[ScheduleBatch] = []
        self.rids: list[list[str]] = []
        self.compositions: dict[int, list[Request]] = {}
        self.most_in_flight = 0
        self.closed = False

    def submit(self, batch: ScheduleBatch) -> Ticket:
        self.modes.append(batch.forward_mode)
        self.seen.append(batch)
        self.rids.append([request.rid for request in getattr(batch.sampling, "requests", ())])
        if batch.step in self.fail_submit:
            self._spoil_states(batch)
            raise RuntimeError(f"planned failure of submit {batch.step}")
        self._check_shape(batch)
        self._written: list[np.ndarray] = []
        self._windows: list[np.ndarray] = []
        result = self._embed(batch) if batch.forward_mode is ForwardMode.EMBED else self._run(batch)
        touched = {int(slot): set(self.slots[slot].pages) for slot in batch.slots if slot}
        written = (self._written, self._windows)
        self.in_flight.append(InFlightStep(batch.step, result, touched, *written, batch, _arrays(batch)))
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return Ticket(batch.step, result)

    def collect(self, ticket: Ticket) -> BatchResult:
        step = self.in_flight.pop(0)
        if step.step != ticket.step:
            raise Violation(f"collected step {ticket.step}, the oldest is {step.step}")
        if ticket.step in self.fail_collect:
            for places in step.written:
                self.cells[places] = NOTHING
            for places in step.windows:
                last = self.window_writer[places // self.limits.page_size] == step.step
                self.window_cells[places[last]] = NOTHING
            self._spoil_states(step.batch)
            raise RuntimeError(f"planned failure of collect {ticket.step}")
        for name, before in step.snapshot.items():
            want((before == getattr(step.batch, name)).all(), f"{name} changed while the device still read it")
        return step.result

    def close(self) -> None:
        self.closed = True

    def _check_room(self, batch: ScheduleBatch) -> None:
        """Check the number of steps in flight: 2 with overlap, else 1; twice that for slices
        without results, which need no result memory."""
        like = [each for each in self.in_flight if self._is_partial(each.batch) == self._is_partial(batch)]
        most = 2 if self.limits.can_overlap else 1
        want(len(like) < (2 * most if self._is_partial(batch) else most), "too many steps in flight")

    def _is_partial(self, batch: ScheduleBatch) -> bool:
        return batch.layers is not None and batch.layers[1] < self.limits.sliced_layers

    def _check_shape(self, batch: ScheduleBatch) -> None:
        want(batch.num_tokens <= self.limits.max_batch_tokens, f"{batch.num_tokens} tokens in a step")
        self._check_room(batch)
        kinds = (batch.forward_mode, self.limits.allows_mixed_batches)
        want(kinds != (ForwardMode.MIXED, False), "a mixed batch on a worker that has none")
        for name in ("slots", "seq_lens", "prefix_lens", "token_offsets", "input_ids", "page_counts", "new_pages"):
            want(getattr(batch, name).dtype == np.int32, f"{name} is not int32")
        lengths = np.diff(batch.token_offsets)
        want((lengths >= 1).all() and lengths.sum() == batch.num_tokens, "rows without tokens")
        drafts = self.limits.draft_tokens if batch.forward_mode.is_decode else 0
        want((batch.seq_lens - batch.prefix_lens == lengths + drafts).all(), "lengths do not add up")
        used = batch.slots[batch.slots != 0]
        want(len(set(used.tolist())) == len(used), "a slot twice in a batch")
        want(batch.new_page_offsets[-1] == len(batch.new_pages), "page offsets do not add up")

    def _run(self, batch: ScheduleBatch) -> BatchResult:
        assert isinstance(batch.sampling, FakeSampling)
        requests = batch.sampling.requests
        want(len(requests) == batch.batch_size, "sampling rows are not the batch's rows")
        want(self.compositions.setdefault(batch.composition, requests) == requests, "one composition, other rows")
        self._check_masks(batch, requests)
        for row, request in enumerate(requests):
            self._enter(batch, row, request)
        self._enter_windows(batch, requests)
        self._load_states(batch)
        for row, request in enumerate(requests):
            self._write(batch, row, request)
        self._save_states(batch)
        runs = [self._emit(batch, row, request) for row, request in enumerate(requests)]
        tokens = [token for run in runs for token in run]
        offsets = offsets_of([len(run) for run in runs])
        bad = np.array([request.rid in self.bad_requests for request in requests], dtype=bool)
        scores = {} if batch.prompt_logprobs is None else self._prompt_scores(batch, requests)
        wants = [request.params.logprobs for request in requests if request.params.logprobs is not None]
        logprobs = make_scores(tokens, max(wants)) if wants else None
        states = self._hidden_states(batch, requests, runs)
        ids = np.array(tokens, dtype=np.int32)
        return BatchResult(batch.step, offsets, ids, bad, logprobs, scores, hidden_states=states)

    def _emit(self, batch: ScheduleBatch, row: int, request: Request) -> list[int]:
        slot = self.slots[batch.slots[row]]
        run = self.truth.tokens(request, slot.length + 1)[-1:] if batch.emits[row] else []
        slot.last_token = run[-1] if run else NOTHING
        return run

    def _check_masks(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Check that exactly the constrained rows that sample have a mask, made from all their
        tokens."""
        rows = [row for row, request in enumerate(requests) if request.matcher is not None and batch.emits[row]]
        if batch.masks is None or batch.mask_rows is None:
            want(not rows, f"no masks for rows {rows}")
            return
        want(batch.mask_rows.tolist() == rows, f"masks for rows {batch.mask_rows.tolist()}, constrained are {rows}")
        for row, words in zip(rows, batch.masks, strict=True):
            request, length = requests[row], self._known_tokens(batch, row)
            emitted = self.truth.tokens(request, length)[len(request.prompt_ids) :]
            want(
                words[0] == mask_word(request, emitted), f"the mask of {request.rid} is not that of its {length} tokens"
            )

    def _known_tokens(self, batch: ScheduleBatch, row: int) -> int:
        """The number of tokens before the one that the row samples."""
        return int(batch.seq_lens[row])

    def _enter(self, batch: ScheduleBatch, row: int, request: Request) -> None:
        """Apply the row's page-table changes and check what is about to be read."""
        number = int(batch.slots[row])
        slot = self.slots[number]
        new = batch.new_pages[batch.new_page_offsets[row] : batch.new_page_offsets[row + 1]].tolist()
        count, prefix = int(batch.page_counts[row]), int(batch.prefix_lens[row])
        if count == 0:
            want(all(number not in step.pages for step in self.in_flight), f"slot {number} reused while in flight")
            self.slots[number] = slot = Slot(request, state=slot.state)
            slot.length = prefix
            collected = self.in_flight[0].step if self.in_flight else batch.step
            shared = new[: prefix // self.limits.page_size]
            want(prefix % self.limits.page_size == 0, f"a prefix of {prefix} cells is not whole pages")
            want(
                all(self.writer[page] < collected for page in shared), "a page is shared before its writer is collected"
            )
        want(slot.owner is request, f"slot {number} belongs to another request")
        want(count == len(slot.pages), f"page_counts {count}, the device has {len(slot.pages)} entries")
        least = max(1, self.limits.window_unit)
        want(all(least <= page <= self.limits.num_pages for page in new), f"pages {new}")
        slot.pages += new
        want(len(set(slot.pages)) == len(slot.pages), "a page twice in a table")
        self._check_lengths(batch, row, slot, request)
        self._check_cells(slot, request, slot.length)
        if batch.history_offsets is not None and batch.history_ids is not None:
            start, end = batch.history_offsets[row : row + 2]
            slot.history += batch.history_ids[start:end].tolist()
        if request.params.needs_history or self.limits.keeps_history:
            known = self.truth.tokens(request, len(slot.history))
            want(slot.history == known, f"history {slot.history} of other tokens")
            if count == 0:
                want(len(known) == request.num_tokens, f"history {slot.history} is not complete")

    def _check_lengths(self, batch: ScheduleBatch, row: int, slot: Slot, request: Request) -> None:
        """Check that the row's length equals the device's, and that its pages hold its new
        tokens."""
        prefix = int(batch.prefix_lens[row])
        want(prefix == slot.length, f"prefix {prefix}, the device has {slot.length} cells")
        needed, size = int(batch.seq_lens[row]), self.limits.page_size
        want(len(slot.pages) >= -(-needed // size), "cells beyond the page table")
        want(len(slot.pages) <= -(-(needed + self._spare(batch, row, request)) // size), "pages without cells")

    def _spare(self, batch: ScheduleBatch, row: int, request: Request) -> int:
        """KV cells that the row may have in addition to those of its tokens."""
        return 0

    def _load_states(self, batch: ScheduleBatch) -> None:
        """Copy states in. A slot without a new state keeps what its last request left."""
        if batch.state_from is None or batch.state_to is None:
            want(batch.state_from is batch.state_to, "states are moved in one direction")
            return
        want(self.limits.keeps_state, "states are moved that the worker does not keep")
        want(batch.state_from.dtype == batch.state_to.dtype == np.int32, "states' places are not int32")
        want(len(batch.state_from) == len(batch.state_to) == batch.batch_size, "states are not the batch's rows")
        want(batch.state_to.any() or (batch.state_from >= 0).any(), "state arrays though no row moves one")
        for number, place in zip(batch.slots, batch.state_from.tolist(), strict=True):
            if place >= 0:
                self.slots[number].state = self.snapshots[place] if place else EMPTY

    def _save_states(self, batch: ScheduleBatch) -> None:
        if batch.state_to is None:
            return
        used = batch.state_to[batch.state_to != 0].tolist()
        want(len(set(used)) == len(used), f"a snapshot is written twice in a step: {used}")
        for row in np.flatnonzero(batch.state_to).tolist():
            self.snapshots[batch.state_to[row]] = self.slots[batch.slots[row]].state

    def _spoil_states(self, batch: ScheduleBatch) -> None:
        """Overwrite states: a failed step may have written anything."""
        for slot in batch.slots.tolist():
            self.slots[slot].state = NOTHING
        for place in [] if batch.state_to is None else batch.state_to[batch.state_to != 0].tolist():
            self.snapshots[place] = NOTHING

    def _continue_state(self, slot: Slot, request: Request, digests: list[int], start: int) -> None:
        """Check that the forward continues from the state after exactly its prefix, then advance
        it."""
        is_bad = request.rid in self.bad_requests
        if self.limits.keeps_state and not is_bad:
            wanted = digests[start - 1] if start else EMPTY
            want(slot.state == wanted, f"the state of {request.rid} is not that of its {start} tokens")
        slot.state = NOTHING if is_bad else digests[-1]

    def _check_cells(self, slot: Slot, request: Request, prefix: int) -> None:
        if not prefix or request.rid in self.bad_requests:
            return
        self._check_found(request, self.cells[self._places(slot, np.arange(prefix))], prefix, "page")

    def _check_found(self, request: Request, found: np.ndarray, prefix: int, kind: str) -> None:
        """Check the cells of the last tokens of a prefix."""
        start, ahead = prefix - len(found), self.limits.lookahead
        truth = np.array(self.truth.tokens(request, prefix + ahead))[start:]
        right = found[:, 0] == self.truth.digests(request, prefix)[start:]
        want(right.all(), f"{kind} cells of {request.rid} hold another request's tokens")
        for step in range(1, ahead + 1):
            known = np.where(found[:, step] == NOTHING, truth[step : step + len(found)], found[:, step])
            want((known == truth[step : step + len(found)]).all(), f"a {kind} depends on other following tokens")
            want((found[: max(len(found) - step, 0), step] != NOTHING).all(), f"a {kind} is not complete")

    def _enter_windows(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Apply the lists of window pages, then check that each list is right and holds all tokens
        that its row sees."""
        given = (batch.window_starts, batch.window_offsets, batch.window_pages)
        if not self.limits.num_window_pages:
            want(given == (None, None, None), "window pages of a worker that keeps none")
            return
        starts, lists = batch.window_starts, self._window_lists(batch)
        assert starts is not None and len(starts) == batch.batch_size and starts.dtype == np.int32
        written: list[int] = []
        for row, (start, request) in enumerate(zip(starts.tolist(), requests, strict=True)):
            slot = self.slots[batch.slots[row]]
            self._take_window_list(batch, row, slot, start, lists[row])
            self._check_window_list(batch, row, slot, request)
            written += slot.window_pages[(int(batch.prefix_lens[row]) - start) // self.limits.page_size :]
        want(len(set(written)) == len(written), f"a window page is written by two rows: {written}")

    def _window_lists(self, batch: ScheduleBatch) -> list[list[int]]:
        offsets, pages = batch.window_offsets, batch.window_pages
        if offsets is None or pages is None:
            want(offsets is pages, "window lists in half")
            return [[]] * batch.batch_size
        want(offsets.dtype == pages.dtype == np.int32, "window lists are not int32")
        want(len(offsets) == batch.batch_size + 1, "window lists are not the batch's rows")
        want(0 < offsets[-1] == len(pages), "window lists without pages")
        return [part.tolist() for part in np.split(pages, offsets[1:-1])]

    def _take_window_list(self, batch: ScheduleBatch, row: int, slot: Slot, start: int, pages: list[int]) -> None:
        if not pages:
            want(batch.page_counts[row], f"slot {batch.slots[row]} has the window pages of its last request")
            want(start == slot.window_start, f"window_starts {start}, the device's list begins at {slot.window_start}")
            return
        want((start, pages) != (slot.window_start, slot.window_pages), "a window list that the device has")
        if not batch.page_counts[row]:
            prefix = int(batch.prefix_lens[row])
            collected = self.in_flight[0].step if self.in_flight else batch.step
            shared = pages[: (prefix - start) // self.limits.page_size]
            want(
                (self.window_writer[shared] < collected).all(), "a window page is shared before its writer is collected"
            )
        slot.window_start, slot.window_pages = start, pages

    def _check_window_list(self, batch: ScheduleBatch, row: int, slot: Slot, request: Request) -> None:
        size, prefix = self.limits.page_size, int(batch.prefix_lens[row])
        start, pages = slot.window_start, slot.window_pages
        want(start % size == 0, f"a list of window pages begins at {start}, within a page")
        want(len(pages) == -(-int(batch.seq_lens[row]) // size) - start // size, f"{len(pages)} window pages")
        want(len(pages) <= least_window_pages(self.limits), f"{len(pages)} window pages are too many")
        want(len(set(pages)) == len(pages), "a window page twice in a list")
        want(all(1 <= page <= self.last_window for page in pages), f"window pages {pages}")
        want(not self.limits.window_unit or not any(page % self.limits.window_unit for page in pages), "half a unit")
        seen = max(0, prefix - self.limits.window + 1)
        whole = (prefix // size * size - self.limits.lookahead) // size * size
        first = max(0, whole - self.limits.window + 1) // size * size
        want(start <= seen, f"window pages from {start} on, {request.rid} sees from {seen} on")
        want(start >= first, f"window pages from {start} on, those before {first} are dead at {prefix}")
        if request.rid not in self.bad_requests:
            found = self.window_cells[self._window_places(slot, np.arange(seen, prefix))]
            self._check_found(request, found, prefix, "window page")

    def _write(self, batch: ScheduleBatch, row: int, request: Request) -> None:
        slot = self.slots[batch.slots[row]]
        start, end = slot.length, int(batch.seq_lens[row])
        ids = batch.input_ids[batch.token_offsets[row] : batch.token_offsets[row + 1]].tolist()
        is_decode = batch.forward_mode is ForwardMode.DECODE
        if is_decode or ids[0] < 0:
            want(slot.last_token != NOTHING, "a row decodes that has sampled nothing")
            want(ids[0] in (slot.last_token, -int(batch.slots[row])), f"token {ids[0]} instead of the last sampled")
            want(len(ids) == 1, "a decode row with several tokens")
            ids = [slot.last_token]
        want(ids == self.truth.tokens(request, end)[start:], f"{request.rid} brings wrong tokens")
        digests = self.truth.digests(request, end)
        self._continue_state(slot, request, digests, start)
        self._set(batch, row, np.arange(start, end), 0, digests[start:])
        if self.limits.num_window_pages:
            self._write_window(batch, slot, request, start, end)
        for ahead in range(1, self.limits.lookahead + 1):
            first = max(start - ahead, 0)
            tokens = self.truth.tokens(request, end)[first + ahead : end]
            self._set(batch, row, np.arange(first, first + len(tokens)), ahead, tokens)
        if request.rid in self.bad_requests:
            self.cells[self._places(slot, np.arange(start, end))] = NOTHING
        slot.length = end

    def _set(self, batch: ScheduleBatch, row: int, positions: np.ndarray, column: int, values: list[int]) -> None:
        """Write cells. A page that changes must not be in the table of another row in flight."""
        number = int(batch.slots[row])
        places = self._places(self.slots[number], positions)
        changed = self.cells[places, column] != values
        if column == 0:
            changed[:] = True
        for page in set((places[changed] // self.limits.page_size).tolist()):
            for step in self.in_flight:
                others = [other for other, pages in step.pages.items() if page in pages and other != number]
                want(not others, f"page {page} is written while slot {others} of step {step.step} still reads it")
            same_step = [other for other in batch.slots.tolist() if other != number and page in self.slots[other].pages]
            want(not same_step, f"page {page} is written while slot {same_step} of the same step reads it")
            self.writer[page] = batch.step
        if column == 0:
            self.cells[places] = NOTHING
            self._written.append(places)
            if self.limits.window_unit:
                size = self.limits.page_size
                units = places // size // self.limits.window_unit * self.limits.window_unit
                self.window_cells[units * size + places % size] = NOTHING
        self.cells[places, column] = values

    def _write_window(self, batch: ScheduleBatch, slot: Slot, request: Request, start: int, end: int) -> None:
        places = self._window_places(slot, np.arange(start, end))
        self.window_cells[places] = NOTHING
        for part in range(self.limits.window_unit):
            self.cells[places + part * self.limits.page_size] = NOTHING
        self._windows.append(places)
        if request.rid in self.bad_requests:
            return
        tokens = np.array(self.truth.tokens(request, end))
        self.window_cells[places, 0] = self.truth.digests(request, end)[start:]
        for ahead in range(1, self.limits.lookahead + 1):
            first = max(start - ahead, slot.window_start)
            rewritten = self._window_places(slot, np.arange(first, end - ahead))
            self.window_cells[rewritten, ahead] = tokens[first + ahead : end]
        self.window_writer[slot.window_pages[max(start - slot.window_start, 0) // self.limits.page_size :]] = batch.step

    def _window_places(self, slot: Slot, positions: np.ndarray) -> np.ndarray:
        size, places = self.limits.page_size, positions - slot.window_start
        return np.array(slot.window_pages, dtype=np.int64)[places // size] * size + places % size

    def _places(self, slot: Slot, positions: np.ndarray) -> np.ndarray:
        pages = np.array(slot.pages, dtype=np.int64)
        return pages[positions // self.limits.page_size] * self.limits.page_size + positions % self.limits.page_size

    def _prompt_scores(self, batch: ScheduleBatch, requests: list[Request]) -> dict[int, TokenLogprobs]:
        assert batch.prompt_logprobs is not None and batch.next_ids is not None
        scores = {}
        for row in np.flatnonzero(batch.prompt_logprobs >= 0).tolist():
            want(requests[row].scores_prompt, f"{requests[row].rid} asks again for the scores that it has")
            ids = batch.input_ids[batch.token_offsets[row] + 1 : batch.token_offsets[row + 1]].tolist()
            scores[row] = make_scores([*ids, int(batch.next_ids[row])], int(batch.prompt_logprobs.max()))
        return scores

    def _hidden_states(
        self, batch: ScheduleBatch, requests: list[Request], runs: list[list[int]]
    ) -> dict[int, np.ndarray]:
        """The requested states. That of a token identifies it: its position, and a hash of all
        tokens up to it."""
        mode = batch.capture_hidden_mode.take()
        before = batch.return_hidden_states_before_norm.take()
        want((batch.hidden_modes is not None) == (mode is not CaptureHiddenMode.NONE), "modes of rows without a mode")
        if batch.hidden_modes is None:
            return {}
        modes = batch.hidden_modes
        want(np.abs(modes).max() == mode, f"the modes of the rows are {modes}, that of all is {mode}")
        want(before == (modes.min() < 0), "norm inputs are wanted of no row, or of unnamed ones")
        states: dict[int, np.ndarray] = {}
        for row, (own, request) in enumerate(zip(modes.tolist(), requests, strict=True)):
            params, end = request.params, self.slots[batch.slots[row]].length
            want(not own or params.return_hidden_states is not None, f"{request.rid} wants no states")
            if not own:
                continue
            is_before = own < 0
            want(is_before == params.return_hidden_states_before_norm, f"the other states of {request.rid}")
            is_verified = self.limits.draft_tokens and batch.forward_mode.is_decode
            count = len(runs[row]) if is_verified else 1
            if abs(own) == CaptureHiddenMode.FULL and not is_verified:
                count = int(np.diff(batch.token_offsets)[row])
            states[row] = make_states(self.truth.digests(request, end), end - count, is_before)
        return states

    def _embed(self, batch: ScheduleBatch) -> BatchResult:
        prompts = np.split(batch.input_ids, batch.token_offsets[1:-1])
        rows = np.array([[prompt.sum(), len(prompt)] for prompt in prompts], dtype=np.float32)
        offsets = np.zeros(len(prompts) + 1, dtype=np.int32)
        bad = np.zeros(len(prompts), dtype=bool)
        return BatchResult(batch.step, offsets, np.zeros(0, dtype=np.int32), bad, embeddings=rows)


def make_scores(tokens: list[int], alternatives: int) -> TokenLogprobs:
    """Log-probabilities that identify their token: -token, with alternatives token, token + 1,
    ..."""
    ids = np.array(tokens, dtype=np.int32)
    tops = ids[:, None] + np.arange(alternatives, dtype=np.int32)
    return TokenLogprobs(-ids.astype(np.float32), ids, tops, -tops.astype(np.float32))


def make_states(digests: list[int], start: int, before: bool) -> np.ndarray:
    """States float32[n, 3] of the tokens from `start` on; `digests` has the hashes of all
    tokens."""
    rows = [[place, digest % (1 << 20), before] for place, digest in enumerate(digests)]
    return np.array(rows[start:], dtype=np.float32).reshape(-1, 3)


def _arrays(batch: ScheduleBatch) -> dict[str, np.ndarray]:
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return {name: value.copy() for name, value in values.items() if isinstance(value, np.ndarray)}


def want(holds: object, found: str) -> None:
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(found)
