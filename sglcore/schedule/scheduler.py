"""Choose the requests of the next step by priority, then first come, first served, with chunked
prefill.

Decode rows and prompt chunks share a step. When pages run out, requests that come later in this
order are preempted (retracted). Follow one step from `next_batch` to `finish`. The scheduler knows
requests and limits, no device.
"""

from __future__ import annotations

from collections import Counter
from operator import sub

import numpy as np

from sglcore.schedule.batch_builder import BatchBuilder, Chunk, Compose
from sglcore.schedule.draft_counts import cells_of
from sglcore.schedule.prefill_policy import PrefillPolicy, WholePrompts
from sglcore.schedule.request import Request, State
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput, FinishReason, token_logprobs
from sglcore.schedule.result_checks import (
    check_limits,
    check_request,
    check_result,
    cut_logprobs,
    follows,
    has_no_way,
    take_drafts,
    take_prompt_logprobs,
    up_to_end,
    why_bad,
    why_refused,
)
from sglcore.schedule.returned_states import hand_over, take_hidden_states
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.sampling_rows import SamplingRows
from sglcore.schedule.scheduler_stats import SchedulerStats, memory_counts
from sglcore.schedule.sliced_prompt import SlicedPrompt
from sglcore.schedule.steps_in_flight import BatchRecord, InFlight
from sglcore.schedule.waiting_queue import WaitingQueue
from sglcore.worker.model_worker import BatchResult, Limits, TokenLogprobs
from sglcore.worker.schedule_batch import ScheduleBatch


class Scheduler:
    """The requests of one worker. `next_batch` plans a step, `finish` takes its results. Not
    thread-safe.

    `compose` makes the sampling state of a batch from its requests, row by row (default:
    SamplingRows). A step may be planned while the step before it is in flight. `first_composition`:
    the first composition number; several schedulers of one worker need numbers that are far apart.
    `prefill` divides prompts into steps (default: each step runs all layers). Raises ConfigError if
    the pages do not hold one request of max_model_len tokens, or if `limits` have both draft tokens
    and prompt slices.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        prefix_cache: bool = True,
        compose: Compose | None = None,
        first_composition: int = 0,
        prefill: PrefillPolicy | None = None,
    ) -> None:
        check_limits(limits)
        self.limits = limits
        self._waiting = WaitingQueue()
        self._embedding = WaitingQueue()
        self.running = RunningRequests(limits, self._waiting, prefix_cache)
        self.requests: dict[str, Request] = {}
        """The requests that have not ended, by id."""
        self.memory = self.running.memory
        self._builder = BatchBuilder(limits, compose or SamplingRows(), first_composition, self.memory)
        self._arrivals = self._step = self._collected = 0
        self._prompt_tokens = self._stale_rows = self._invalid_rows = 0
        self.drafts = Counter[tuple[int, int, int, int]]()
        """Number of request steps by `DraftCell`, which names their proposed and accepted draft
        tokens.
        """
        self._extended_last = self._embedded_last = False
        self._prefill = WholePrompts(limits) if prefill is None else prefill

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or a step is in flight."""
        return bool(self.requests) or len(self.in_flight) > 0

    @property
    def in_flight(self) -> InFlight:
        """The steps that were planned and are not yet finished or dropped."""
        return self.running.in_flight

    @property
    def awaits_tokens(self) -> bool:
        """Whether the next step needs tokens of a step in flight: one of its rows samples under a
        grammar.
        """
        return any(record.is_masked for record in self.in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never run here, if its `rid` belongs to a
        request that has not ended, if this object was added before, or if its `leader` (the sibling
        with the same prompt) was not added.
        """
        check_request(request, self.limits)
        if request.rid in self.requests or request.arrival >= 0:
            raise RequestError(f"request {request.rid!r} was added before; give every request its own id")
        if request.leader is not None and request.leader.arrival < 0:
            raise RequestError(f"request {request.rid!r} follows a leader that was not added; add the leader first")
        self.requests[request.rid] = request
        self._arrivals += 1
        request.arrival = self._arrivals
        self._queue_of(request).add(request)

    def abort(self, rid: str) -> EngineOutput | None:
        """End a request now, in any state. Returns its last output, or None if it is unknown or has
        ended.
        """
        request = self.requests.get(rid)
        return None if request is None else self.end(request, "abort")

    def stop(self, rid: str, cause: str) -> EngineOutput | None:
        """End a request after its text reached the stop string `cause`. Returns its last output, or
        None if it is unknown or has ended.
        """
        request = self.requests.get(rid)
        return None if request is None else self.end(request, "stop", cause)

    def flush_prefix_cache(self) -> int:
        """Evict the cached prefixes that no running request uses. Returns the number of pages."""
        return self.memory.flush()

    def next_batch(self) -> ScheduleBatch | None:
        """Plan a step as if all planned steps had run. Returns None if nothing can run before the
        next collect, for example while the scheduler `awaits_tokens`.

        Decode rows come first, in a stable order. Chunks follow: running prompts by priority, then
        arrival, and after them new ones. The next call overwrites the arrays, so submit a copy
        (`overlap_forward_isolation`).
        """
        if self.awaits_tokens:
            return None
        turn = len(self._embedding) > 0 and not self._embedded_last
        batch = None if turn else self._generate()
        self._embedded_last = batch is None and len(self._embedding) > 0
        return self._embed() if self._embedded_last else batch

    def finish(self, record: BatchRecord, result: BatchResult) -> list[EngineOutput]:
        """Take the results of the oldest step in flight, which has this record. Returns the outputs
        in row order. Raises ValueError for another step, or for a result that does not fit it.
        """
        self._prefill.observe(record, self.in_flight)
        check_result(record, result, self.limits.draft_tokens)
        self._close(record)
        if record.is_partial:
            self.running.release(record)
            return []
        ends, drafts, has_final = slice(None), self.limits.draft_tokens, False
        if drafts and not record.spans:
            offsets = result.token_offsets
            self.running.rows.end_step(record.slots, offsets[1:] - offsets[:-1], drafts)
            ends, has_final = offsets[1:] - 1, self.running.rows.any_final
        if result.drafts is not None:
            take_drafts(record.requests, result.drafts)
        self._builder.last_tokens[record.slots] = result.token_ids[ends]
        scored = result.logprobs is not None or result.hidden_states
        special = has_final or record.has_stale_rows or scored or result.bad_rows.any()
        plain = 0 if special else len(record.requests) - len(record.spans)
        if result.proposed is not None and plain:
            outputs = self._take_runs(record, result, result.proposed.tolist())
        else:
            outputs = self._take_tokens(record.requests[:plain], result.token_ids[:plain].tolist())
        if plain < len(record.requests):
            outputs += self._take_rows(record, result, plain)
        if record.finishing:
            self._end_finishing(record, outputs)
        if has_final:
            self._part_with_finishing()
        self.running.release(record)
        return outputs

    def drop(self, record: BatchRecord, error: BaseException) -> list[EngineOutput]:
        """Close the oldest step in flight, which has this record, without results. Its requests end
        with "error". Returns their last outputs.
        """
        text = f"step {record.step} failed: {type(error).__name__}: {error}"
        for request in record.requests:
            request.held.spoil()
        outputs = [self.end(each, "error", error=text) for each in record.requests if each.state is not State.FINISHED]
        self._close(record)
        self.running.release(record)
        return outputs

    def stats(self) -> SchedulerStats:
        """Return counts of requests, steps, pages, snapshots, window pages and tokens."""
        return SchedulerStats(
            waiting=len(self._waiting) + len(self._embedding) + self.running.arrivals.num_waiting,
            running=len(self.running),
            decoding=len(self.running.rows.requests),
            in_flight=len(self.in_flight),
            steps=self._step,
            computed_prompt_tokens=self._prompt_tokens,
            retractions=self.running.retractions,
            stale_rows=self._stale_rows,
            invalid_rows=self._invalid_rows,
            **memory_counts(self.running.memory, self.limits),
        )

    def audit(self) -> None:
        """Raise AssertionError if a page, request slot, snapshot or window page is lost or held
        twice, or if a request that has ended is still known. O(num_pages).
        """
        self.running.audit()
        self._builder.audit()

    def _queue_of(self, request: Request) -> WaitingQueue:
        if request.is_remote:
            return self.running.arrivals.waiting
        return self._embedding if request.task == "embed" else self._waiting

    def _generate(self) -> ScheduleBatch | None:
        running, mixed = self.running, self.limits.allows_mixed_batches and not self._prefill.is_on
        if running.sliced is not None:
            return self._go_on(running.sliced)
        prompts = bool(running.extending or len(self._waiting) or running.arrivals.written)
        decodes = mixed or not prompts or (self._extended_last and bool(running.rows.requests))
        running.slide_windows()
        served = running.claim_pages() if decodes else True
        plans = prompts and (mixed or not decodes)
        room = self._prefill.room(running) - (len(running.rows.requests) if decodes else 0)
        chunks = running.plan_chunks(room, served) if plans else []
        if not chunks and not decodes:
            decodes, served = True, running.claim_pages()
        self._extended_last = not decodes
        return self._advance(decodes, served, chunks)

    def _advance(self, decodes: bool, served: bool, chunks: list[Chunk]) -> ScheduleBatch | None:
        rows, step = self.running.rows, self._step + 1
        if decodes and served and not chunks:
            if not rows.requests:
                return None
            rows.begin_step(slice(None), self.limits.draft_tokens)
            batch = self._builder.build_decode(step, rows, self._collected, self.running.save_states(None))
            rows.last_steps[:] = step
        else:
            has_room = rows.room_for(self.running.reach) <= rows.allocated_lens
            chosen = np.flatnonzero(has_room) if decodes else np.zeros(0, dtype=np.intp)
            if not len(chosen) and not chunks:
                return None
            rows.begin_step(chosen, self.limits.draft_tokens)
            saves = self.running.save_states(chosen)
            batch = self._builder.build(step, rows, chosen, chunks, self._collected, saves)
            rows.last_steps[chosen] = step
        record = self._open_record(chunks)
        record.is_masked = batch.masks is not None
        self._prefill.begin(self.running, record, batch, chunks)
        self._part_with_finishing()
        if not record.is_partial:
            self._advance_chunks(record, chunks)
        return batch

    def _go_on(self, sliced: SlicedPrompt) -> ScheduleBatch | None:
        """Plan the next step while a prompt runs in slices: a decode step and a slice in turn, only
        slices while no request decodes, and a further decode step first if its time must be
        measured.
        """
        running = self.running
        running.slide_windows()
        if running.rows.requests and (self._extended_last or self._prefill.takes_quiet()):
            served, self._extended_last = running.claim_pages(), False
            if (batch := self._advance(True, served, [])) is not None:
                return batch
            if running.sliced is None:
                return self._generate()
        self._extended_last = True
        self._step += 1
        record, batch = self._prefill.go_on(running, sliced, self._step)
        self.in_flight.open(record)
        if not record.is_partial:
            self._advance_chunks(record, running.end_sliced(record, sliced))
        return batch

    def _open_record(self, chunks: list[Chunk]) -> BatchRecord:
        self._step += 1
        spans = [(request.held.num_cells, request.held.num_cells + count) for request, count in chunks]
        self._prompt_tokens += sum(end - start for start, end in spans)
        record = BatchRecord(self._step, self._builder.requests, self._builder.slots, spans)
        self.in_flight.open(record)
        return record

    def _part_with_finishing(self) -> None:
        """Remove the rows that emit their last token in a step in flight, so that no later step
        contains them.
        """
        rows = self.running.rows
        if not rows.any_final:
            return
        last = np.flatnonzero(rows.seq_lens >= rows.final_seq_lens)
        requests = [rows.requests[row] for row in last.tolist()]
        rows.remove_rows(last.tolist())
        for request in requests:
            record = self.in_flight.naming(request.run.last_step)
            assert record is not None
            record.add_finishing(request)

    def _advance_chunks(self, record: BatchRecord, chunks: list[Chunk]) -> None:
        self.running.advance(record, chunks)

    def _embed(self) -> ScheduleBatch:
        chosen = self._embedding.first_of(self.limits.max_requests, self.limits.max_batch_tokens)
        batch = self._builder.build_embed(self._step + 1, chosen)
        record = self._open_record([(request, len(request.prompt_ids)) for request in chosen])
        for request in chosen:
            self._embedding.remove(request)
            request.state, request.cached_tokens = State.EXTENDING, 0
            request.run.join(record.step)
            request.run.leave()
        return batch

    def _close(self, record: BatchRecord) -> None:
        self.in_flight.close(record)
        self._collected = record.step

    def _take_tokens(self, requests: list[Request], tokens: list[int]) -> list[EngineOutput]:
        """Take one token of each decode row, if all logits were good and no request has ended;
        returns their outputs. A stop token ends its request, and a token that the grammar forbids
        ends it with an error."""
        outputs = []
        for request, token in zip(requests, tokens, strict=True):
            if request.matcher is not None and not follows(request, token):
                outputs.append(self.end(request, "error", error=why_refused(request, token)))
                continue
            request.output_ids.append(token)
            output = request.output([token])
            outputs.append(output)
            if token in request.stop_ids:
                self.end(request, "stop", token, output=output)
        return outputs

    def _take_runs(self, record: BatchRecord, result: BatchResult, proposed: list[int]) -> list[EngineOutput]:
        """Take several tokens of each decode row, if no request has ended and none ends by length;
        returns their outputs. `proposed` has each row's number of verified draft tokens, which are
        counted in `drafts`."""
        requests, tokens, offsets = record.requests, result.token_ids.tolist(), result.token_offsets.tolist()
        outputs = []
        for request, start, end, made in zip(requests, offsets, offsets[1:], proposed, strict=False):
            run = tokens[start:end]
            if request.matcher is None and not request.run.leaving and request.stop_ids.isdisjoint(run):
                request.output_ids += run
                output = request.output(run)
            else:
                output = self.take_run(request, run, None, start)
            output.proposed = made
            outputs.append(output)
        self.drafts.update(cells_of(requests, proposed, map(sub, offsets[1:], offsets)))
        return outputs

    def _take_rows(self, record: BatchRecord, result: BatchResult, first: int) -> list[EngineOutput]:
        """Return the outputs of all rows from row `first` on. Rows of ended requests are only
        counted, a row with invalid logits ends its request with an error, and chunks may have no
        output yet.
        """
        outputs = []
        bad, offsets, ids = result.bad_rows.tolist(), result.token_offsets.tolist(), result.token_ids.tolist()
        proposed = None if result.proposed is None else result.proposed.tolist()
        decodes = len(record.requests) - len(record.spans)
        for row, request in enumerate(record.requests[first:], start=first):
            if bad[row]:
                request.held.spoil()
            if request.state is State.FINISHED:
                self._stale_rows += 1
                continue
            if bad[row]:
                self._invalid_rows += 1
                outputs.append(self.end(request, "error", error=why_bad(request, record.step)))
                continue
            if row >= decodes:
                self._take_chunk(request, record.spans[row - decodes], row, result)
            run = ids[offsets[row] : offsets[row + 1]]
            start = record.spans[row - decodes][0] if row >= decodes else request.num_tokens - 1
            if result.embeddings is not None:
                request.embedding = result.embeddings[row].copy()
                outputs.append(self.end(request, "stop"))
            elif run:
                outputs.append(self.take_run(request, run, result.logprobs, offsets[row]))
                if proposed is not None:
                    outputs[-1].proposed = proposed[row]
                    self.drafts.update(cells_of([request], proposed[row : row + 1], [len(run)]))
            if row in result.hidden_states:
                take_hidden_states(request, result.hidden_states[row], start)
                if run:
                    hand_over(request, outputs[-1])
        return outputs

    def _take_chunk(self, request: Request, span: tuple[int, int], row: int, result: BatchResult) -> None:
        start, end = span
        take_prompt_logprobs(request, result.prompt_logprobs.get(row), start, end)
        if not request.run.leaving:
            self.running.memory.publish(request, end)

    def take_run(self, request: Request, run: list[int], logprobs: TokenLogprobs | None, start: int) -> EngineOutput:
        """Take the tokens that a request emitted in a step, up to the token that ends it. Returns
        its output; the request may have ended. `start` is the index of the first token in
        `logprobs` (None: the step has no log-probabilities).
        """
        room, wanted = request.run.final_seq_len + 1 - request.num_tokens, request.params.logprobs
        kept, refused = up_to_end(request, run[:room])
        request.output_ids += kept
        output = request.output(kept)
        if logprobs is not None and wanted is not None and kept:
            found = cut_logprobs(logprobs, start, start + len(kept), wanted)
            request.logprobs += [cut_logprobs(found, place, place + 1, wanted) for place in range(len(kept))]
            output.logprobs = token_logprobs(kept, found, wanted)
        if refused is not None:
            return self.end(request, "error", error=why_refused(request, refused), output=output)
        if kept and kept[-1] in request.stop_ids:
            return self.end(request, "stop", kept[-1], output=output)
        if len(kept) == room:
            return self.end(request, "length", output=output)
        return output

    def _end_finishing(self, record: BatchRecord, outputs: list[EngineOutput]) -> None:
        known = {(output.request_id, output.index): output for output in outputs}
        for request in record.finishing:
            if request.state is not State.FINISHED:
                self.end(request, "length", output=known[request.request_id, request.sample_index])

    def end(
        self,
        request: Request,
        reason: FinishReason,
        cause: int | str | None = None,
        error: str = "",
        output: EngineOutput | None = None,
    ) -> EngineOutput:
        """End a request and return its last output: `output`, changed in place, or else one without
        tokens. `cause` is the id of the stop token, or the stop string; `error` says why it failed,
        with the reason "error".

        Its request slot and pages are released at once, or when the last step in flight that
        contains it is collected. Raises KeyError for a request that has ended.
        """
        output = output or request.output([])
        output.refused = reason == "error" and has_no_way(request)
        request.finish_reason, request.stop_cause, request.error = reason, cause, error
        del self.requests[request.rid]
        if request.state is State.WAITING:
            self._queue_of(request).remove(request)
        elif request.state is State.ARRIVING:
            self.running.arrivals.leave(request)
        elif not request.run.leaving:
            self.running.leave(request)
        elif self.in_flight.naming(request.run.last_step) is not None:
            self.in_flight.mark_stale()
        request.state = State.FINISHED
        request.matcher = request.change = None
        self.running.forget(request)
        self._builder.forget(request)
        output.finish_reason, output.stop_cause, output.error = reason, cause, error
        return output
