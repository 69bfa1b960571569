"""Random traces on the worker that verifies draft tokens, with any acceptance rate. Schedulers with
one planted bug must be caught."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from types import MappingProxyType

import numpy as np
import pytest

from sglcore.schedule.batch_builder import BatchBuilder, Chunk
from sglcore.schedule.cache.prefix_cache import PrefixCache
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.decode_rows import DecodeRows
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Ints, Request, State
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.result_checks import check_result
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.model_worker import BatchResult, Limits, TokenLogprobs
from sglcore.worker.schedule_batch import ScheduleBatch, offsets_of
from tests.schedule.drive import Drive
from tests.schedule.fake_speculation import Accepts, FakeSpeculativeWorker
from tests.schedule.fake_worker import FakeMatcher, Truth, make_params
from tests.schedule.trace import Trace, check_caught, draw_trace, plant, play, with_proposals
from tests.schedule.traces.test_traces import FreesBeforeCollect

SEEDS = range(3000, 3400)


def draw(seed: int) -> Trace:
    """A trace with draft tokens. Some late requests continue the text of an earlier one; every
    second trace has too few pages for its running requests."""
    rnd = Random(seed)
    trace = with_proposals(rnd, draw_trace(rnd), rnd.choice([1, 3, 5]))
    truth, most = Truth(trace.limits.vocab_size), trace.limits.max_model_len - 2
    for index, early in enumerate([request for _, request in trace.arrivals if request.task == "generate"][:2]):
        known = truth.tokens(early, min(len(early.prompt_ids) + rnd.randint(1, 12), most))
        late = Request(f"late{index}", np.array([*known, rnd.randint(0, 2)]), make_params(9), seed=early.seed)
        trace.arrivals.append((rnd.randint(8, 40), late))
    if seed % 2:
        return trace
    for index in range(3):
        prompt = np.array([rnd.randint(0, 2) for _ in range(rnd.randint(1, 4))], dtype=np.int32)
        long = Request(f"long{index}", prompt, make_params(rnd.choice([9, None]), logprobs=1), seed=rnd.randint(0, 99))
        trace.arrivals.append((rnd.randint(0, 3), long))
    pages = -(-trace.limits.max_model_len // trace.limits.page_size) + rnd.randint(0, 2)
    return replace(trace, limits=replace(trace.limits, num_pages=pages, max_requests=6, max_batch_tokens=20))


def test_the_traces_reach_what_they_are_meant_to_reach() -> None:
    seen = dict.fromkeys((*WATCHED, "retractions", "hits of pages that depend on the next token", "overlapped"), 0)
    for seed in SEEDS[:60]:
        print("seed", seed)
        outcome = play(draw(seed), plant(Watched, ""))
        stats, limits = outcome.scheduler.stats(), outcome.trace.limits
        for name in outcome.scheduler.__dict__.get("watched", ()):
            seen[name] += 1
        seen["retractions"] += stats.retractions > 0
        seen["hits of pages that depend on the next token"] += stats.hit_tokens > 0 and limits.lookahead > 0
        seen["overlapped"] += outcome.worker.most_in_flight > 1
    assert min(seen.values()) >= 3, seen


WATCHED = (
    "several",
    "stopped within",
    "all that was left",
    "of who was retracted",
    "of who has ended",
    "several pages",
)


class Watched(Scheduler):
    """Counts events of steps with several tokens per request."""

    def finish(self, record: BatchRecord, result: BatchResult) -> list[EngineOutput]:
        watched = self.__dict__.setdefault("watched", set())
        batch, offsets = record.batch, result.token_offsets
        for row, request in enumerate(record.requests if result.proposed is not None else ()):
            run = result.token_ids[offsets[row] : offsets[row + 1]].tolist()
            if len(run) < 2:
                continue
            watched.add("several")
            if request.state is State.FINISHED:
                watched.add("of who has ended")
                continue
            watched.update(["stopped within"] * bool(request.stop_ids & set(run[:-1])))
            watched.update(["all that was left"] * (request.num_tokens + len(run) == request.run.final_seq_len + 1))
            watched.update(["of who was retracted"] * (request.state is State.WAITING))
            watched.update(
                ["several pages"] * (batch is not None and bool((np.diff(batch.new_page_offsets) > 1).any()))
            )
        return super().finish(record, result)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("accepts", "steps"), [("all", 4), ("none", 13)])
def test_a_request_takes_as_many_steps_as_proposals_are_wrong(accepts: Accepts, steps: int, overlap: bool) -> None:
    drive = Drive(overlap=overlap, draft_tokens=3, lookahead=1, allows_mixed_batches=False)
    assert isinstance(drive.worker, FakeSpeculativeWorker)
    drive.worker.accepts = accepts
    request = drive.add("a", 6, 1 + 12)
    drive.run()
    # The step that is planned before the last result is known runs for nothing, unless the number
    # of steps is known in advance.
    late = overlap and accepts == "all"
    assert drive.scheduler.stats().steps == steps + late and request.output_ids == drive.alone(request)


def test_a_grammar_beside_free_rows_has_its_proposals_verified_as_far_as_it_allows_them() -> None:
    drive = Drive(draft_tokens=3, allows_mixed_batches=False)
    assert isinstance(drive.worker, FakeSpeculativeWorker)
    drive.worker.accepts = "all"
    bound, free = drive.make("bound", 4, 20), drive.make("free", 4, 20)
    bound.matcher = FakeMatcher(bound)
    drive.scheduler.add(bound)
    drive.scheduler.add(free)
    drive.step(5)
    assert 5 < len(bound.output_ids) < len(free.output_ids) == 13
    drive.run()
    assert bound.output_ids == drive.alone(bound) and free.output_ids == drive.alone(free)


class EmitsOneMore(FakeSpeculativeWorker):
    """Emits one more token than its only request may have."""

    def _run(self, batch: ScheduleBatch) -> BatchResult:
        result = super()._run(batch)
        if not batch.forward_mode.is_decode:
            return result
        ids = np.append(result.token_ids, np.int32(7))
        return replace(result, token_ids=ids, token_offsets=offsets_of([len(ids)]))


def test_what_a_worker_emits_beyond_the_most_tokens_is_not_taken() -> None:
    drive = Drive(draft_tokens=3, allows_mixed_batches=False)
    drive.worker.__class__ = EmitsOneMore
    assert isinstance(drive.worker, EmitsOneMore)
    drive.worker.accepts = "all"
    request = drive.add("a", 4, 3)
    drive.run()
    assert (request.output_ids, request.finish_reason) == (drive.alone(request), "length")


@pytest.mark.parametrize("counts", [[0, 2], [1, 5], [4]])
def test_a_result_of_more_tokens_than_can_be_right_or_of_none_is_refused(counts: list[int]) -> None:
    record = BatchRecord(3, [Drive().make(name, 4) for name in "ab"], np.array([1, 2], dtype=np.int32))
    ids, flags = np.zeros(sum(counts), dtype=np.int32), np.zeros(2, dtype=bool)
    with pytest.raises(ValueError, match="wanted"):
        check_result(record, BatchResult(3, offsets_of(counts), ids, flags, proposed=np.full(2, 3)), 3)


class HasTheBoundOfHeadDrafting(RunningRequests):
    @property
    def reach(self) -> int:
        return 1 + self._limits.draft_tokens


class HasTheBoundOfOneToken(RunningRequests):
    @property
    def reach(self) -> int:
        return 1


class ForgetsPromises(RunningRequests):
    def _promised(self) -> int:
        return len(self)


class ForgetsGains(DecodeRows):
    __slots__ = ()

    def end_step(self, slots: Ints, counts: Ints, drafts: int) -> None:
        super().end_step(slots, np.ones_like(counts), drafts)


class GivesGainsToOthers(DecodeRows):
    __slots__ = ()

    def end_step(self, slots: Ints, counts: Ints, drafts: int) -> None:
        super().end_step(slots, counts[::-1], drafts)


class CountsCellsThatNobodyNeeds(DecodeRows):
    __slots__ = ()

    def end_step(self, slots: Ints, counts: Ints, drafts: int) -> None:
        final = self.final_seq_lens.copy()
        self.final_seq_lens += drafts
        super().end_step(slots, counts, drafts)
        self.final_seq_lens[:] = final


class KeepsTheDrafted(DecodeRows):
    __slots__ = ()

    def end_step(self, slots: Ints, counts: Ints, drafts: int) -> None:
        super().end_step(slots, counts, 0)


class TakesTheDraftedBackFromAll(DecodeRows):
    __slots__ = ()

    def end_step(self, slots: Ints, counts: Ints, drafts: int) -> None:
        super().end_step(slots, counts, drafts)
        self.drafted_lens[:] = 0


class ForgetsTheDrafted(DecodeRows):
    __slots__ = ()

    def begin_step(self, chosen, drafts: int) -> None:
        super().begin_step(chosen, 0)


class PublishesTheBound(Memory):
    def release(self, request: Request, cells: int) -> None:
        super().release(request, cells and cells + 5)


class IgnoresStopsWithinARun(Scheduler):
    def take_run(self, request: Request, run: list[int], logprobs: TokenLogprobs | None, start: int) -> EngineOutput:
        stops, request.stop_ids = request.stop_ids, request.stop_ids & {run[-1]}
        output = super().take_run(request, run, logprobs, start)
        request.stop_ids = stops
        return output


class TakesMoreThanIsLeft(Scheduler):
    def take_run(self, request: Request, run: list[int], logprobs: TokenLogprobs | None, start: int) -> EngineOutput:
        request.run.final_seq_len += 1
        output = super().take_run(request, run, logprobs, start)
        request.run.final_seq_len -= 1
        return output


class TakesTheScoresOfTheFirstRow(Scheduler):
    def take_run(self, request: Request, run: list[int], logprobs: TokenLogprobs | None, start: int) -> EngineOutput:
        return super().take_run(request, run, logprobs, 0)


class KeepsWhoIsFinishing(Scheduler):
    def _part_with_finishing(self) -> None:
        if len(self.in_flight) and self.in_flight.newest.ticket is None:
            super()._part_with_finishing()


class TakesTheFirstForTheLast(Scheduler):
    def finish(self, record: BatchRecord, result: BatchResult) -> list[EngineOutput]:
        outputs = super().finish(record, result)
        if result.proposed is not None:
            self._builder.last_tokens[record.slots] = result.token_ids[result.token_offsets[:-1]]
        return outputs


class IgnoresFinalLengths(BatchBuilder):
    def _cell_limits(self, rows: DecodeRows, chosen, extended: list[Request]) -> Ints:
        limits = super()._cell_limits(rows, chosen, extended)
        held = rows.allocated_lens[chosen]
        limits[: len(held)] = np.where(limits[: len(held)] == rows.most_cells[chosen], held, limits[: len(held)])
        return limits


class HasMasksForTheNextTokenOnly(BatchBuilder):
    def _add_masks(self, batch: ScheduleBatch) -> None:
        super()._add_masks(batch)
        if batch.mask_rows is not None and batch.mask_nodes is not None and batch.masks is not None:
            first = batch.mask_nodes == 0
            batch.mask_rows, batch.mask_nodes = batch.mask_rows[first], batch.mask_nodes[first]
            batch.masks = batch.masks[first]


class TakesTheProposalsOfOthers(Scheduler):
    def finish(self, record: BatchRecord, result: BatchResult) -> list[EngineOutput]:
        drafts = None if result.drafts is None else np.roll(result.drafts, 1, axis=0)
        return super().finish(record, replace(result, drafts=drafts))


class KeepsOldProposals(Scheduler):
    def finish(self, record: BatchRecord, result: BatchResult) -> list[EngineOutput]:
        is_new = record.batch is not None and not record.batch.forward_mode.is_decode
        return super().finish(record, result if is_new else replace(result, drafts=None))


class SendsOnePageOfARow(BatchBuilder):
    def build_decode(self, *args) -> ScheduleBatch:
        batch = super().build_decode(*args)
        counts = np.diff(batch.new_page_offsets)
        batch.new_pages = batch.new_pages[batch.new_page_offsets[:-1][counts > 0]]
        batch.new_page_offsets = offsets_of(np.minimum(counts, 1))
        return batch


class SendsTheTokenAfterTheNext(BatchBuilder):
    def build(self, step: int, rows, chosen, chunks: list[Chunk], collected: int, saves=None) -> ScheduleBatch:
        batch = super().build(step, rows, chosen, chunks, collected, saves)
        for row, (request, count) in enumerate(chunks, start=len(chosen)):
            end = request.held.num_cells + count + 1
            if batch.next_ids is not None and end < request.run.target:
                batch.next_ids[row] = request.tokens(end, end + 1)[0]
        return batch


class SendsTheNextOnlyWithScores(BatchBuilder):
    @property
    def _reads_next(self) -> bool:
        return False


class SendsHistoryOnlyToPenalties(BatchBuilder):
    @property
    def _keeps_history(self) -> bool:
        return False


class IgnoresLookahead(PrefixCache):
    def key(self, tokens: np.ndarray, index: int) -> bytes:
        start = index * self.page_size
        return tokens[start : start + self.page_size].tobytes()


SCHEDULER, RUNNING, ROWS, BUILDER, MEMORY = "", "running", "running.rows", "_builder", "running.memory"
MUTANTS = (
    (HasTheBoundOfHeadDrafting, RUNNING, "proposals without cells"),
    (HasTheBoundOfOneToken, RUNNING, "proposals without cells"),
    (FreesBeforeCollect, RUNNING, "still reads it"),
    (ForgetsPromises, RUNNING, "pages are promised"),
    (ForgetsGains, ROWS, "the device has"),
    (GivesGainsToOthers, ROWS, "not the bound"),
    (CountsCellsThatNobodyNeeds, ROWS, ""),
    (KeepsTheDrafted, ROWS, "not the bound"),
    (TakesTheDraftedBackFromAll, ROWS, "the device has"),
    (ForgetsTheDrafted, ROWS, "the device has"),
    (PublishesTheBound, MEMORY, "another request's tokens"),
    (IgnoresStopsWithinARun, SCHEDULER, "differs from its run alone"),
    (TakesMoreThanIsLeft, SCHEDULER, ""),
    (TakesTheScoresOfTheFirstRow, SCHEDULER, ""),
    (KeepsWhoIsFinishing, SCHEDULER, "on its way"),
    (TakesTheFirstForTheLast, SCHEDULER, "instead of the last sampled"),
    (IgnoresFinalLengths, BUILDER, "no output needs more"),
    (HasMasksForTheNextTokenOnly, BUILDER, "wanted (row, node, word)"),
    (TakesTheProposalsOfOthers, SCHEDULER, "wanted (row, node, word)"),
    (KeepsOldProposals, SCHEDULER, "wanted (row, node, word)"),
    (SendsOnePageOfARow, BUILDER, "beyond the page table"),
    (SendsTheTokenAfterTheNext, BUILDER, "after a chunk"),
    (SendsTheNextOnlyWithScores, BUILDER, "no tokens after the chunks"),
    (SendsHistoryOnlyToPenalties, BUILDER, "is not complete"),
    (IgnoresLookahead, "running.memory.cache", "other following tokens"),
)


NEAREST = MappingProxyType(
    {
        CountsCellsThatNobodyNeeds: 3060,
        TakesTheProposalsOfOthers: 3011,
    }
)
"""Seeds that caught bugs which most seeds miss. They are tried first, then all others."""


@pytest.mark.parametrize(("kind", "path", "message"), MUTANTS)
def test_a_planted_bug_is_caught_by_some_trace(kind: type, path: str, message: str) -> None:
    check_caught(draw, SEEDS, plant(kind, path), message, NEAREST.get(kind))


def test_what_is_proposed_after_a_prompt_has_cells_of_its_own() -> None:
    """One KV cell per draft token, but none that the output cannot need."""
    limits = Limits(64, 2, 1, 64, 64, 97, allows_mixed_batches=False, draft_tokens=3)
    for most, wanted in ((20, 8), (2, 6)):
        scheduler = make_scheduler(limits)
        scheduler.add(Request("one", np.arange(5, dtype=np.int32), make_params(most), seed=0))
        batch = scheduler.next_batch()
        assert batch is not None and batch.cell_limits is not None and batch.cell_limits.tolist() == [wanted]
