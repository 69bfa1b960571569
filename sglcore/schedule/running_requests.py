"""The requests that hold a request slot and pages, and preemption when pages run out.

A request takes pages only from requests that come after it by priority and arrival (`by_turn`), so
the first one always progresses.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from sglcore.schedule.arrivals import Arrivals
from sglcore.schedule.cache.in_batch_prefix import MOST_COMPARED, InBatchPrefixes
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.decode_rows import DecodeRows
from sglcore.schedule.request import Ints, Request, State
from sglcore.schedule.sliced_prompt import SlicedPrompt
from sglcore.schedule.steps_in_flight import BatchRecord, InFlight
from sglcore.schedule.waiting_queue import WaitingQueue, by_turn
from sglcore.worker.model_worker import Limits

MOST_PASSED_OVER = 64
"""Number of waiting requests that may be passed over, so that the cost of a step does not grow with
the queue.
"""


class RunningRequests:
    """Running requests: those in `extending` prefill, by priority, then by arrival; those in `rows`
    decode. Preempted ones go to `waiting`. `sliced` is the prompt that runs in slices of layers
    (None: no prompt does).
    """

    def __init__(self, limits: Limits, waiting: WaitingQueue, prefix_cache: bool) -> None:
        self.memory = Memory(limits, prefix_cache)
        self.arrivals = Arrivals(self.memory)
        self.in_flight = InFlight()
        self._in_batch_prefixes = InBatchPrefixes(self.memory)
        self.rows = DecodeRows(limits.max_requests)
        self.extending: list[Request] = []
        self.sliced: SlicedPrompt | None = None
        self.waiting = waiting
        self.retractions = 0
        self._has_turn = False
        self._limits = limits
        # Each running request needs at least one token of a step, so the step's budget limits their
        # number.
        self._most = min(limits.max_requests, limits.max_batch_tokens)
        self._spare = max(limits.draft_tokens, limits.draft_cells)
        # A draft tree needs all its KV slots, however few tokens of the output are left.
        self._beyond = self._spare if limits.draft_cells else 0
        # KV slots that a step may write after the known ones: its tokens, then those for the next
        # draft tokens.
        self.reach = 1 + limits.draft_tokens + self._spare
        self._free_slots = list(range(limits.max_requests, 0, -1))
        self._refused: tuple[Request, int] | None = None
        self._chunked: list[Request] = []

    def __len__(self) -> int:
        return len(self.rows.requests) + len(self.extending)

    def admit_next(self) -> Request | None:
        """Start the prefill of the first waiting request that may start, and return it. It gets a
        request slot and the pages of its cached prefix. Returns None if no request may start.

        Only requests that wait for a prefix that their leader or another request is computing are
        passed over. The slots and pages that they will need are reserved for them.
        """
        room, kept = min(len(self._free_slots), self._most - len(self)), list[int]()
        for request in self.waiting:
            if len(kept) >= min(room, MOST_PASSED_OVER):
                return None
            if not self._follows(request):
                break
            kept.append(self._own_pages(request))
        else:
            return None
        if request.run.leaving or self._refused == (request, self.memory.version):
            return None
        kept_windows = sum(min(pages, self.memory.windows.span) for pages in kept)
        if not self.memory.admit(request, self._promised() + sum(kept), len(self) + kept_windows):
            self._refused = (request, self.memory.version)
            return None
        self.waiting.remove(request)
        self._start(request)
        return request

    def admit_written(self) -> Request | None:
        """Give a request slot to the first request that another engine has prefilled, and return
        it. None if there is no such request, or no slot.
        """
        written = self.arrivals.written
        if not written or not self._free_slots or len(self) >= self._most:
            return None
        request = min(written, key=by_turn)
        written.remove(request)
        self._start(request)
        return request

    def reserve(self) -> Request | None:
        """Allocate the prompt's pages for the first request that another engine will prefill, and
        return it. None if there is none or it must wait, also while any request is in `waiting`:
        preempted ones come first.
        """
        return None if len(self.waiting) else self.arrivals.reserve(self._promised())

    def limit(self, request: Request) -> None:
        """Set the number of KV slots with which the request emits its last token, and its most KV
        slots (`RunState`)."""
        prompt, most, context = len(request.prompt_ids), request.params.max_tokens, self._limits.max_model_len
        final = (context if most is None else min(prompt + most, context)) - 1
        request.run.limit(final, min(final + self._beyond, context))

    def compare_waiting(self) -> None:
        """Compare the first waiting requests with the running prompts, so that they ask for common
        prefixes before the running requests pass their ends. Does nothing if prefixes are shared
        without a request for them (`Memory.needs_asking`).
        """
        if self.memory.needs_asking:
            for request in islice(self.waiting, MOST_COMPARED):
                self._follows(request)

    def slide_windows(self) -> None:
        """Free the window pages that only the chunks of the step before needed, except those that a
        waiting request asks for.
        """
        if not self._chunked:
            return
        self.compare_waiting()
        for request in self._chunked:
            is_decoding = request.state is State.DECODING
            if request.run.leaving or not (is_decoding or request.state is State.EXTENDING):
                continue
            if not self.memory.windows.slide(request.held.windows, request.held.num_cells):
                continue
            self.memory.version += 1
            if is_decoding:
                row = self.rows.requests.index(request)
                self.rows.window_starts[row] = request.held.windows.first * self._limits.page_size
        self._chunked.clear()

    def claim_pages(self) -> bool:
        """Allocate pages for each decode row without room for the next step; requests that come
        later are preempted if needed.

        Returns False if pages were short: a row got none and skips this step, or a row was
        preempted.
        """
        rows, size = self.rows, self._limits.page_size
        missing = rows.room_for(self.reach) - rows.allocated_lens
        full = np.flatnonzero(missing > 0).tolist()
        version, all_served = rows.version, True
        if self.memory.keeps_windows:
            self._slide_rows(full)
        for row, request in [(row, rows.requests[row]) for row in full]:
            if request.state is not State.DECODING:
                continue
            pages = self.memory.pages_for(int(missing[row]))
            if self._obtain(request, pages):
                place = row if rows.version == version else rows.requests.index(request)
                rows.allocated_lens[place] += pages * size
            else:
                all_served = False
        return all_served and rows.version == version

    def plan_chunks(self, budget: int, may_admit: bool) -> list[tuple[Request, int]]:
        """Plan prompt chunks for the `budget` of tokens that the decode rows leave, and allocate
        their pages: running prompts first, then prompts that another engine has prefilled, then new
        ones if `may_admit`. Returns each request with the number of tokens of its chunk.

        If a request was preempted, no new one is admitted: the pages are for the request that took
        them. With prompt slices, a long prompt takes many steps while others decode, so other
        prompts get every second chunk.
        """
        chunks: list[tuple[Request, int]] = []
        self.compare_waiting()
        self._has_turn = (
            bool(self._limits.sliced_layers and self.rows.requests and self.extending) and not self._has_turn
        )
        if self._has_turn and (chunks := self._plan_in_turn(budget, may_admit)):
            return chunks
        retractions = self.retractions
        for request in tuple(self.extending):
            if budget and request.state is State.EXTENDING:
                count = self.take_chunk(request, budget)
                budget -= count
                chunks += [(request, count)] if count else []
        while budget and (written := self.admit_written()) is not None:
            count = self.take_chunk(written, budget)
            budget -= count
            chunks += [(written, count)] if count else []
        may_admit = may_admit and retractions == self.retractions
        while may_admit and budget and (admitted := self.admit_next()) is not None:
            count = self.take_chunk(admitted, budget)
            budget -= count
            chunks.append((admitted, count))
        return chunks

    def _plan_in_turn(self, budget: int, may_admit: bool) -> list[tuple[Request, int]]:
        """Plan chunks, in the form of `plan_chunks`, for the prompts that a long one would delay:
        new prompts if `may_admit`, or else the running prompt with the fewest tokens left.
        """
        chunks: list[tuple[Request, int]] = []
        while may_admit and budget and (admitted := self.admit_next()) is not None:
            count = self.take_chunk(admitted, budget)
            budget -= count
            chunks.append((admitted, count))
        if not chunks and self.extending:
            least = min(self.extending, key=lambda each: each.run.target - each.held.num_cells)
            count = self.take_chunk(least, budget)
            chunks += [(least, count)] if count else []
        return chunks

    def take_chunk(self, request: Request, budget: int) -> int:
        """Allocate the pages of the request's next chunk, if needed by preempting requests that
        come after it, and return the chunk's number of tokens, at most `budget`. 0: the request
        skips this step.
        """
        held, start, target = request.held, request.held.num_cells, request.run.target
        room = len(held.pages) * self._limits.page_size - start
        want = self.memory.snapshots.shorten(held.states, start, min(budget, target - start))
        if want > room:
            pages = self.memory.pages_for(want - room)
            self._obtain(request, min(pages, max(self.memory.room, 1)))
        count = min(want, len(held.pages) * self._limits.page_size - start)
        end = start + count
        if count and self.memory.takes_snapshots and end % self._limits.page_size == 0:
            self.memory.save(request, end)
        if count and self.memory.keeps_windows:
            self._chunked.append(request)
        if self._limits.draft_tokens and end == target:
            self._add_spare(request)
        return count

    def advance(self, record: BatchRecord, chunks: Sequence[tuple[Request, int]]) -> None:
        """Account for the chunks in the step of a record. A request with a complete prompt then
        decodes, or finishes.
        """
        for request, count in chunks:
            held, run = request.held, request.run
            held.fill(held.num_cells + count)
            run.join(record.step)
            run.send(len(held.pages), held.windows.first)
            if held.num_cells < run.target:
                continue
            self.extending.remove(request)
            if held.num_cells >= run.final_seq_len:
                record.add_finishing(request)
            else:
                self.rows.append(request, self._limits.page_size)

    def end_sliced(self, record: BatchRecord, sliced: SlicedPrompt) -> list[tuple[Request, int]]:
        """Close the sliced prompt: the step of `record` runs its last layers. Returns the chunks of
        the requests that have not left.
        """
        self.sliced = None
        record.is_masked = sliced.is_masked
        record.released += sliced.released
        if self.memory.keeps_windows:
            self._chunked += [request for request, _ in sliced.staying]
        return sliced.staying

    def _leave_sliced(self, sliced: SlicedPrompt, request: Request) -> None:
        """Remove a request from the sliced prompt. When all its requests have left, the prompt is
        dropped: their slots and pages are released with its newest slice in flight, or at once
        without one.
        """
        sliced.leave(request)
        self.in_flight.mark_stale()
        if sliced.is_wanted:
            return
        self.sliced, record = None, self.in_flight.newest_slice
        if record is not None:
            record.released += sliced.released
            return
        for each in sliced.released:
            self._release(each)

    def _add_spare(self, request: Request) -> None:
        """Allocate KV slots for the draft tokens after a prompt's last chunk, if unreserved pages
        are free.
        """
        wanted = min(request.run.target + self._spare, request.run.most_cells)
        pages = self.memory.pages_for(wanted) - len(request.held.pages)
        if 0 < pages <= self.memory.room - self._promised():
            self.memory.grow(request, pages)

    def save_states(self, chosen: NDArray[np.intp] | None) -> Ints | None:
        """Return int32[N]: the snapshots that receive the states of the chosen decode rows (None:
        all), 0 for none; None if no row saves. `rows.seq_lens` must already include this step.

        A row saves its state when it fills its last page. No row does with draft tokens, because
        only the device knows how many of them its state includes.
        """
        if not self.memory.takes_snapshots or self._limits.draft_tokens:
            return None
        rows = self.rows
        chosen = np.arange(len(rows.requests)) if chosen is None else chosen
        full = np.flatnonzero(rows.seq_lens[chosen] == rows.allocated_lens[chosen]).tolist()
        if not full:
            return None
        places, save = np.zeros(len(chosen), dtype=np.int32), self.memory.save
        for index in full:
            row = chosen[index]
            places[index] = save(rows.requests[row], int(rows.seq_lens[row]))
        return places if places.any() else None

    def leave(self, request: Request) -> None:
        """Remove a request in prefill or decode. Its request slot and pages are released at once,
        or with the last step in flight that contains it. The caller sets its new state.
        """
        if request.state is State.EXTENDING:
            self.extending.remove(request)
        else:
            self.rows.remove(request)
        if self.sliced is not None and self.sliced.holds(request):
            self._leave_sliced(self.sliced, request)
            return
        record = self.in_flight.naming(request.run.last_step)
        if record is None:
            self._release(request)
            return
        request.run.leave()
        record.released.append(request)
        self.in_flight.mark_stale()

    def release(self, record: BatchRecord) -> None:
        """Release the requests that a collected step was the last to contain."""
        for request in record.released:
            self._release(request)

    def holders(self) -> list[Request]:
        """Return all requests that hold a request slot, for audits."""
        gone = () if self.sliced is None else self.sliced.released
        return [
            *self.rows.requests,
            *self.extending,
            *gone,
            *(each for record in self.in_flight for each in record.released),
        ]

    def page_holders(self) -> list[Request]:
        """Return all requests that hold pages, for audits."""
        return [*self.holders(), *self.arrivals.holders]

    def audit(self) -> None:
        """Raise AssertionError if a page, request slot, snapshot or window page is lost or held
        twice, or if a request that has ended is still known. O(num_pages).
        """
        holders = self.holders()
        self.memory.audit(self.page_holders())
        slots = sorted(self._free_slots + [request.run.slot for request in holders])
        assert slots == list(range(1, self._limits.max_requests + 1)), f"slots lost or held twice: {slots}"
        self._in_batch_prefixes.audit()

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that has ended."""
        self._in_batch_prefixes.forget(request)

    def _follows(self, request: Request) -> bool:
        if not self.memory.caches or request.needs_prefill or request.embeds is not None:
            return False
        leader = request.leader
        if leader is None or leader.held.prompt_published or leader.state is State.FINISHED:
            return self._in_batch_prefixes.must_wait(request)
        return True

    def _own_pages(self, request: Request) -> int:
        """Return the number of pages that a passed-over request will need in addition to the shared
        ones that it waits for."""
        awaited = self._in_batch_prefixes.awaited(request)
        common = len(request.prompt_ids) // self._limits.page_size if awaited is None else awaited.pages
        return max(1, self.memory.pages_for(request.num_tokens) - common)

    def _promised(self) -> int:
        """Return the number of reserved pages: those of one step for each running request.

        Prefilling requests come first, so they need no reserve: while one lacks pages, the step has
        no tokens left or no page is free. With prompt slices or snapshots they may not come first,
        or a chunk may end early for a snapshot, so their missing pages are reserved too.
        """
        steps = len(self) * self.memory.pages_for(self.reach)
        if not (self._limits.sliced_layers or self.memory.takes_snapshots):
            return steps
        return steps + sum(self.memory.pages_for(each.run.target) - len(each.held.pages) for each in self.extending)

    def _start(self, request: Request) -> None:
        if request.scores_prompt:
            request.prompt_logprobs.clear()
            request.scored_tokens = 0
        if request.cached_tokens < 0:
            request.begin_with(request.held.num_cells)
        self.limit(request)
        request.run.begin(self._free_slots.pop(), request.num_tokens)
        request.state = State.EXTENDING
        if request.embeds is None:
            self._in_batch_prefixes.add(request)
        insort(self.extending, request, key=by_turn)
        self.compare_waiting()

    def _obtain(self, request: Request, count: int) -> bool:
        """Allocate `count` pages for the request. If they are not free, preempt requests that come
        after it, the last one first. Returns False, without pages, if they must be waited for;
        others may have been preempted."""
        while not self.memory.grow(request, count):
            if self._comes_back(count):
                return False
            victim = max((*self.rows.requests, *self.extending), key=by_turn)
            if by_turn(victim) <= by_turn(request):
                return False
            self._retract(victim)
        return True

    def _comes_back(self, count: int) -> bool:
        """Return whether `count` pages will be free after all steps in flight are collected."""
        memory = self.memory
        released = [request for record in self.in_flight for request in record.released]
        released += () if self.sliced is None else self.sliced.released
        windows = memory.windows.kept + sum(len(each.held.windows.pages) for each in released)
        return memory.fits(count, sum(len(request.held.pages) for request in released), windows)

    def _slide_rows(self, rows: list[int]) -> None:
        """Free the window pages that later steps do not see, for decode rows that start a page."""
        for row in rows:
            request = self.rows.requests[row]
            self.memory.windows.slide(request.held.windows, int(self.rows.seq_lens[row]))
            self.rows.window_starts[row] = request.held.windows.first * self._limits.page_size

    def _retract(self, victim: Request) -> None:
        """Preempt a request: return it to its position in the queue. It will prefill its prompt and
        its output again, except what stays cached.

        A token in flight for it is valid and is taken when it arrives.
        """
        self.leave(victim)
        victim.state = State.WAITING
        self.waiting.add(victim)
        self.retractions += 1

    def _release(self, request: Request) -> None:
        self.arrivals.give_back(request)
        self._free_slots.append(request.run.slot)
        request.run.end()
