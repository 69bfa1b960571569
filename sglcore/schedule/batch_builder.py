"""Build the batch that a worker receives: decode rows first, in a stable order, then the chosen
prompt chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.cache.prefix_proposals import NONE, PrefixProposals
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.decode_rows import DecodeRows
from sglcore.schedule.embeds_in_batch import add_embeds
from sglcore.schedule.request import Request
from sglcore.schedule.returned_states import add_hidden_modes, put_hidden_mode
from sglcore.schedule.token_masks import Change, add_changes, fill_along
from sglcore.worker.model_worker import Limits
from sglcore.worker.schedule_batch import ForwardMode, HostSampling, ScheduleBatch, offsets_of

Ints = NDArray[np.int32]
Compose = Callable[[Sequence[Request]], HostSampling | None]
Chunk = tuple[Request, int]
KEEP = -1
"""Value in `state_from`: the state of this request slot does not change."""


class BatchBuilder:
    """Converts the scheduler's choice of requests to the arrays of a `ScheduleBatch` (`build`).
    `last_tokens` int32[slots]: the last collected token of each request slot. Of the batch built
    last, `requests` are those of all rows, and `slots` int32 the request slots of the rows that
    sample.
    """

    def __init__(self, limits: Limits, compose: Compose, first_composition: int, memory: Memory | None = None) -> None:
        """`compose` makes the sampling state of a list of requests, row by row.
        `first_composition`: compositions are counted from there. `memory`: the source of draft
        tokens from the prefix cache, if the worker takes them."""
        self.last_tokens = np.zeros(limits.max_requests + 1, dtype=np.int32)
        self.requests: list[Request] = []
        self.slots: Ints = np.zeros(0, dtype=np.int32)
        self._page_size = limits.page_size
        self._mask_words = -(-limits.vocab_size // 32)
        self._keeps_state = limits.keeps_state
        self._keeps_windows = limits.num_window_pages > 0
        self._keeps_history = limits.reads_history or limits.keeps_history
        self._reads_next = limits.lookahead > 0
        self._drafts = limits.draft_tokens
        self._proposals = PrefixProposals(memory, self._drafts) if memory and limits.takes_proposals else None
        self._compose = compose
        self._composition = first_composition
        self._sampling: HostSampling | None = None
        self._constrained: list[tuple[int, Request]] = []
        self._has_hidden = False
        self._steady: ScheduleBatch | None = None
        self._steady_version = -1
        self._had_chunks = False

    def build(
        self,
        step: int,
        rows: DecodeRows,
        chosen: NDArray[np.intp],
        chunks: list[Chunk],
        collected: int,
        saves: Ints | None = None,
    ) -> ScheduleBatch:
        """Build the batch of a step: the decode rows with the indices `chosen`, then a row for each
        chunk. Call it once per step, with this step already in `rows.seq_lens`: it notes in `rows`
        which pages the worker has been told of.

        `collected` is the number of the last collected step. Tokens of later steps are not known on
        the host: the input id of such a row is minus its request slot. `saves` int32[chosen]:
        snapshots that receive the states of the decode rows, 0 for none (None: no row saves).
        """
        self._steady = None
        extended = [request for request, _ in chunks]
        self._set_rows([rows.requests[row] for row in chosen.tolist()] + extended, bool(chunks))
        seq_lens = _join(rows.seq_lens[chosen], [request.held.num_cells + count for request, count in chunks])
        if self._drafts:
            seq_lens[: len(chosen)] += rows.drafted_lens[chosen]
        lengths = _join(np.ones(len(chosen), dtype=np.int32), [count for _, count in chunks])
        slots = _join(rows.slots[chosen], [request.run.slot for request in extended])
        page_counts = _join(rows.page_counts[chosen], [request.run.sent_pages for request in extended])
        totals = _join(rows.allocated_lens[chosen] // self._page_size, [len(each.held.pages) for each in extended])
        emits = np.ones(len(slots), dtype=bool)
        emits[len(chosen) :] = [emits_after(request, count) for request, count in chunks]
        own, unknown = slots[: len(chosen)], rows.last_steps[chosen] > collected
        decode_ids = np.where(unknown, -own, self.last_tokens[own])
        chunk_ids = [
            request.tokens(request.held.num_cells, request.held.num_cells + count) for request, count in chunks
        ]
        batch = ScheduleBatch(
            step=step,
            forward_mode=_mode(len(chosen), len(chunks)),
            slots=slots,
            seq_lens=seq_lens,
            prefix_lens=seq_lens - lengths,
            cell_limits=self._cell_limits(rows, chosen, extended) if self._drafts else None,
            token_offsets=offsets_of(lengths),
            input_ids=np.concatenate([decode_ids, *chunk_ids]),
            page_counts=page_counts,
            new_page_offsets=offsets_of(totals - page_counts),
            new_pages=self._new_pages(page_counts, totals),
            emits=emits,
            composition=self._composition,
            sampling=self._sampling,
        )
        self.slots = slots[emits]
        rows.page_counts[chosen] = totals[: len(chosen)]
        if self._drafts:
            batch.prefix_lens[: len(chosen)] -= self._drafts
        _add_history(batch, len(chosen), extended, self._keeps_history)
        _add_prompt_logprobs(batch, len(chosen), chunks, self._reads_next)
        if self._keeps_state:
            _add_states(batch, len(chosen), chunks, saves)
        if self._keeps_windows:
            self._add_windows(batch, rows, chosen, extended)
        if self._has_hidden:
            add_hidden_modes(batch, self.requests, [request.held.num_cells + count for request, count in chunks])
        self._add_rest(batch, collected)
        return batch

    def build_decode(self, step: int, rows: DecodeRows, collected: int, saves: Ints | None = None) -> ScheduleBatch:
        """Build a batch of all decode rows, for step number `step`. Tokens of steps after
        `collected` are not known on the host; `saves` int32[rows]: snapshots that receive the
        states, 0 for none (None: no row saves). Returns the same object while the rows do not
        change.

        The next call overwrites its arrays, so keep only a copy.
        """
        batch = self._steady
        if batch is None or self._steady_version != rows.version:
            return self._start_steady(step, rows, collected, saves)
        batch.step = step
        batch.state_from, batch.state_to = None if saves is None else self._kept, saves
        if self._drafts:
            np.add(rows.seq_lens, rows.drafted_lens, out=batch.seq_lens)
            batch.cell_limits = self._cell_limits(rows, slice(None), [])
        self._add_proposals(batch, collected)
        self._add_masks(batch)
        np.subtract(batch.seq_lens, 1 + self._drafts, out=batch.prefix_lens)
        if batch.mrope_positions is not None:
            add_embeds(batch, self.requests)
        if self._has_hidden:
            put_hidden_mode(batch)
        # Every row was in the step before, so either all last tokens are known or none is.
        batch.input_ids = self._placeholders if collected < step - 1 else self.last_tokens[rows.slots]
        fresh = np.flatnonzero(rows.allocated_lens > rows.page_counts * self._page_size)
        batch.window_offsets = batch.window_pages = None
        if not len(fresh):
            batch.page_counts = rows.page_counts
            batch.new_page_offsets, batch.new_pages = self._no_offsets, self._no_pages
            return batch
        batch.page_counts = rows.page_counts.copy()
        rows.page_counts[fresh] = rows.allocated_lens[fresh] // self._page_size
        batch.new_page_offsets = offsets_of(rows.page_counts - batch.page_counts)
        batch.new_pages = self._new_pages(batch.page_counts, rows.page_counts)
        if self._keeps_windows:
            rows.sent_window_starts[fresh] = rows.window_starts[fresh]
            self._add_window_lists(batch, fresh.tolist())
        return batch

    def build_embed(self, step: int, requests: list[Request]) -> ScheduleBatch:
        """Build a batch of whole prompts to embed. It uses no request slots (`slots` is 0 in each
        row) and no pages, and emits no tokens."""
        self._steady = None
        self._set_rows(requests, True)
        lengths = np.array([len(request.prompt_ids) for request in requests], dtype=np.int32)
        zeros = np.zeros(len(requests), dtype=np.int32)
        self.slots = zeros[:0]
        return ScheduleBatch(
            step=step,
            forward_mode=ForwardMode.EMBED,
            slots=zeros,
            seq_lens=lengths,
            prefix_lens=zeros,
            token_offsets=offsets_of(lengths),
            input_ids=np.concatenate([request.prompt_ids for request in requests]),
            page_counts=zeros,
            new_page_offsets=offsets_of(zeros),
            new_pages=zeros[:0],
            emits=np.zeros(len(requests), dtype=bool),
            composition=self._composition,
            token_type_ids=_token_types(requests),
        )

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended."""
        if self._proposals is not None:
            self._proposals.forget(request)

    def audit(self) -> None:
        """Raise AssertionError if a request that has ended is still known."""
        if self._proposals is not None:
            self._proposals.audit()

    def _start_steady(self, step: int, rows: DecodeRows, collected: int, saves: Ints | None) -> ScheduleBatch:
        batch = self.build(step, rows, np.arange(len(rows.requests)), [], collected, saves)
        if not self._drafts:
            batch.seq_lens = rows.seq_lens
        if self._keeps_windows:
            batch.window_starts = rows.window_starts
        self._steady, self._steady_version = batch, rows.version
        self._placeholders = -rows.slots
        self._kept = np.full(len(rows.requests), KEEP, dtype=np.int32)
        self._no_offsets = np.zeros(len(rows.requests) + 1, dtype=np.int32)
        self._no_pages = np.zeros(0, dtype=np.int32)
        return batch

    def _set_rows(self, requests: list[Request], has_chunks: bool) -> None:
        same = requests == self.requests
        if not same:
            self.requests = requests
            self._constrained = [(row, request) for row, request in enumerate(requests) if request.matcher is not None]
            self._has_hidden = any(request.params.return_hidden_states is not None for request in requests)
            self._sampling = self._compose(requests)
        if not same or has_chunks or self._had_chunks:
            self._composition += 1
        self._had_chunks = has_chunks

    def _add_proposals(self, batch: ScheduleBatch, collected: int) -> None:
        """Add draft tokens from the prefix cache to a decode batch if all tokens of its rows are
        known. They also become `Request.drafts` of the rows with a grammar, for which `_add_masks`
        then makes masks.
        """
        if self._proposals is None or not batch.forward_mode.is_decode:
            return
        batch.proposals = found = None if collected < batch.step - 1 else self._proposals.propose(self.requests)
        if found is not None:
            for row, request in self._constrained:
                if found[row, 0] != NONE:
                    request.drafts = found[row].tolist()

    def _add_rest(self, batch: ScheduleBatch, collected: int) -> None:
        """Add the optional inputs: draft tokens, masks, prompt embeddings."""
        self._add_proposals(batch, collected)
        self._add_masks(batch)
        add_embeds(batch, self.requests)

    def _add_masks(self, batch: ScheduleBatch) -> None:
        """Add the masks of each row with a grammar that samples in this step: for its next token,
        and in a decode step for the token after each draft token; and its logit additions for the
        same tokens.
        """
        if not self._constrained:
            return
        emitting = [(row, request) for row, request in self._constrained if batch.emits[row]]
        if not emitting:
            return
        drafts = self._drafts if batch.forward_mode.is_decode else 0
        words = np.empty((len(emitting), 1 + drafts, self._mask_words), dtype=np.int32)
        changes: list[list[Change]] = [[] for _ in emitting]
        found = zip(words, emitting, changes, strict=True)
        counts = [fill_along(request, own, added) for own, (_, request), added in found]
        rows = np.array([row for row, _ in emitting], dtype=np.int32)
        batch.mask_rows = np.repeat(rows, counts)
        add_changes(batch, rows.tolist(), changes)
        if not drafts:
            batch.masks = words[:, 0]
            return
        is_filled = np.arange(1 + drafts, dtype=np.int32) < np.array(counts)[:, None]
        batch.masks, batch.mask_nodes = words[is_filled], np.nonzero(is_filled)[1].astype(np.int32)

    def _cell_limits(self, rows: DecodeRows, chosen: NDArray[np.intp] | slice, extended: list[Request]) -> Ints:
        """Return int32[rows], the decode rows `chosen` and then the prefill rows `extended`: the KV
        slots that each may use, those of its pages, at most `RunState.most_cells`."""
        limits = np.minimum(rows.allocated_lens[chosen], rows.most_cells[chosen])
        return _join(limits, [min(len(each.held.pages) * self._page_size, each.run.most_cells) for each in extended])

    def _add_windows(
        self, batch: ScheduleBatch, rows: DecodeRows, chosen: NDArray[np.intp], extended: list[Request]
    ) -> None:
        """Add the start of each row's window pages (`window_starts`), and the page lists of rows
        that gained or dropped window pages. The rows are the decode rows `chosen` and then the
        prefill rows `extended`; notes in `rows` what is sent."""
        size = self._page_size
        starts = _join(rows.window_starts[chosen], [request.held.windows.first * size for request in extended])
        sent = _join(rows.sent_window_starts[chosen], [request.run.sent_window_first * size for request in extended])
        rows.sent_window_starts[chosen] = starts[: len(chosen)]
        batch.window_starts = starts
        changed = np.flatnonzero((np.diff(batch.new_page_offsets) > 0) | (starts != sent)).tolist()
        if changed:
            self._add_window_lists(batch, changed)

    def _add_window_lists(self, batch: ScheduleBatch, changed: list[int]) -> None:
        lengths, pages = np.zeros(batch.batch_size, dtype=np.int32), list[int]()
        for row in changed:
            listed = self.requests[row].held.windows.pages
            pages += listed
            lengths[row] = len(listed)
        batch.window_offsets, batch.window_pages = offsets_of(lengths), np.array(pages, dtype=np.int32)

    def _new_pages(self, page_counts: Ints, totals: Ints) -> Ints:
        pages: list[int] = []
        for row in np.flatnonzero(totals > page_counts).tolist():
            pages += self.requests[row].held.pages[page_counts[row] : totals[row]]
        return np.array(pages, dtype=np.int32)


def emits_after(request: Request, count: int) -> bool:
    """Return whether a chunk of `count` tokens is the last one of the prefill, so that the request
    samples.
    """
    return request.held.num_cells + count == request.run.target


def _mode(decodes: int, chunks: int) -> ForwardMode:
    if not chunks:
        return ForwardMode.DECODE
    return ForwardMode.MIXED if decodes else ForwardMode.EXTEND


def _join(column: Ints, values: list[int]) -> Ints:
    return np.concatenate([column, np.array(values, dtype=np.int32)])


def _token_types(requests: list[Request]) -> Ints | None:
    """Return the segment ids int32[T] of all tokens, 0 for a prompt without them, or None if no
    prompt has any."""
    if all(request.token_types is None for request in requests):
        return None
    types = [request.token_types for request in requests]
    zeros = (np.zeros_like(request.prompt_ids) for request in requests)
    return np.concatenate([none if given is None else given for given, none in zip(types, zeros, strict=True)])


def _add_history(batch: ScheduleBatch, decodes: int, extended: list[Request], reads_history: bool) -> None:
    """Add all known tokens of the prefill rows `extended` that enter a request slot, if the worker
    needs them of every row (`reads_history`) or the sampling parameters of the row need them.
    `decodes` rows come before these rows."""
    entering = [request.run.last_step < 0 and (reads_history or request.params.needs_history) for request in extended]
    if not any(entering):
        return
    lengths = np.zeros(batch.batch_size, dtype=np.int32)
    known = [
        request.tokens(0, request.num_tokens) for request, enters in zip(extended, entering, strict=True) if enters
    ]
    lengths[decodes:][entering] = [len(tokens) for tokens in known]
    batch.history_offsets = offsets_of(lengths)
    batch.history_ids = np.concatenate(known)


def _add_states(batch: ScheduleBatch, decodes: int, chunks: list[Chunk], saves: Ints | None) -> None:
    """Add the state copies of a step: chunks that enter a request slot start from zeros or a
    snapshot, chunks that end at a planned snapshot write one, and the first `decodes` rows write
    those in `saves` (None: none)."""
    state_from = np.full(batch.batch_size, KEEP, dtype=np.int32)
    state_to = np.zeros(batch.batch_size, dtype=np.int32)
    if saves is not None:
        state_to[:decodes] = saves
    for row, (request, count) in enumerate(chunks, start=decodes):
        if request.run.last_step < 0:
            state_from[row] = request.held.states.restored
        state_to[row] = request.held.states.places.get(request.held.num_cells + count, 0)
    if state_to.any() or (state_from != KEEP).any():
        batch.state_from, batch.state_to = state_from, state_to


def _add_prompt_logprobs(batch: ScheduleBatch, decodes: int, chunks: list[Chunk], reads_next: bool) -> None:
    """Add `next_ids` int32[rows], the token after each chunk (-1: not known, and decode rows), if a
    chunk wants prompt log-probabilities or `reads_next` is true; and in the first case
    `prompt_logprobs` int32[rows], the number of alternatives (-1: not wanted). `decodes` rows come
    before the chunks."""
    scores = any(request.scores_prompt for request, _ in chunks)
    if not scores and not (reads_next and chunks):
        return
    batch.next_ids = np.full(batch.batch_size, -1, dtype=np.int32)
    for row, (request, count) in enumerate(chunks, start=decodes):
        end = request.held.num_cells + count
        if end < request.run.target:
            batch.next_ids[row] = request.tokens(end, end + 1)[0]
    if not scores:
        return
    batch.prompt_logprobs = np.full(batch.batch_size, -1, dtype=np.int32)
    for row, (request, _) in enumerate(chunks, start=decodes):
        if request.scores_prompt:
            batch.prompt_logprobs[row] = request.params.prompt_logprobs or 0
