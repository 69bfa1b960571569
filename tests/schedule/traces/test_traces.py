"""Invariants over random traces: pages and slots are conserved, each request ends once, and outputs
equal those of the request alone.

Each invariant has mutants: schedulers with one planted bug, which the same traces must catch.
"""

from __future__ import annotations

from random import Random
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglcore.schedule.batch_builder import BatchBuilder
from sglcore.schedule.cache.prefix_cache import Node, PrefixCache
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.request import Request, State
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.model_worker import BatchResult
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.schedule.trace import check_caught, draw_trace, plant, play, with_proposals

SEEDS = range(400)


@settings(
    max_examples=750,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=False))
def test_any_trace_ends_as_if_every_request_had_run_alone(rnd: Random) -> None:
    play(with_proposals(rnd, draw_trace(rnd), rnd.choice([0, 0, 1, 3, 5])))


@pytest.mark.parametrize("seed", range(0, 400, 4))
def test_seeded_traces_end_as_if_every_request_had_run_alone(seed: int) -> None:
    print("seed", seed)
    play(draw_trace(Random(seed)))


def test_the_traces_reach_what_they_are_meant_to_reach() -> None:
    seen = dict.fromkeys(("retractions", "hit_tokens", "evicted_pages", "overlapped", "mixed"), 0)
    for seed in range(150):
        outcome = play(draw_trace(Random(seed)))
        stats = outcome.scheduler.stats()
        for name in ("retractions", "hit_tokens", "evicted_pages"):
            seen[name] += getattr(stats, name) > 0
        seen["overlapped"] += outcome.worker.most_in_flight > 1
        seen["mixed"] += ForwardMode.MIXED in outcome.worker.modes
    assert min(seen.values()) >= 5, seen


class PublishesBeforeCollect(Scheduler):
    def _advance_chunks(self, record: BatchRecord, chunks: list[tuple[Request, int]]) -> None:
        super()._advance_chunks(record, chunks)
        for request, _ in chunks:
            self.running.memory.publish(request, request.held.num_cells)


class TakesStaleTokens(Scheduler):
    def _take_rows(self, record: BatchRecord, result: BatchResult, first: int) -> list[EngineOutput]:
        for row, request in enumerate(record.requests):
            if request.state is State.FINISHED and request.task == "generate":
                request.output_ids += result.token_ids[slice(*result.token_offsets[row : row + 2])].tolist()
        return super()._take_rows(record, result, first)


class ForgetsToMarkStale(Scheduler):
    def finish(self, record: BatchRecord, result: BatchResult) -> list[EngineOutput]:
        record.has_stale_rows = False
        return super().finish(record, result)


class FreesBeforeCollect(RunningRequests):
    def leave(self, request: Request) -> None:
        if request.state is State.EXTENDING:
            self.extending.remove(request)
        else:
            self.rows.remove(request)
        self.in_flight.mark_stale()
        self._release(request)


class LeaksAbortedSlots(RunningRequests):
    def _release(self, request: Request) -> None:
        super()._release(request)
        if request.finish_reason == "abort":
            self._free_slots.pop()


class LosesPages(RunningRequests):
    def _release(self, request: Request) -> None:
        if request.held.pages[request.held.shared :]:
            request.held.pages.pop()
        super()._release(request)


class ForgetsOutputsOnRetraction(RunningRequests):
    def _retract(self, victim: Request) -> None:
        super()._retract(victim)
        victim.output_ids.clear()


class RecomputesOnlyThePrompt(RunningRequests):
    def _start(self, request: Request) -> None:
        super()._start(request)
        request.run.target = len(request.prompt_ids)


class NeverRetracts(RunningRequests):
    def _obtain(self, request: Request, count: int) -> bool:
        return self.memory.grow(request, count)


class ForgetsPromises(RunningRequests):
    def _promised(self) -> int:
        return 0


class PublishesWhatFailed(RunningRequests):
    def _release(self, request: Request) -> None:
        reason, request.finish_reason, request.held.is_broken = request.finish_reason, "stop", False
        super()._release(request)
        request.finish_reason = reason


class KeepsScoresOfBefore(RunningRequests):
    def _start(self, request: Request) -> None:
        scores = list(request.prompt_logprobs)
        super()._start(request)
        if request.scores_prompt:
            request.prompt_logprobs[:0] = scores


class AsksForScoresAgain(BatchBuilder):
    def build(self, step: int, rows, chosen, chunks, collected: int, saves=None) -> ScheduleBatch:
        batch = super().build(step, rows, chosen, chunks, collected, saves)
        for row, (request, _) in enumerate(chunks, start=len(chosen)):
            if batch.prompt_logprobs is not None and request.params.prompt_logprobs is not None:
                batch.prompt_logprobs[row] = request.params.prompt_logprobs
        return batch


class DropsPageDifferences(BatchBuilder):
    def build_decode(self, *args) -> ScheduleBatch:
        batch = super().build_decode(*args)
        batch.new_pages = batch.new_pages[:0]
        batch.new_page_offsets = batch.new_page_offsets * 0
        return batch


class CountsPagesAfterTheStep(BatchBuilder):
    def build_decode(self, step: int, rows, collected: int, saves=None) -> ScheduleBatch:
        batch = super().build_decode(step, rows, collected, saves)
        batch.page_counts = rows.page_counts
        return batch


class TakesOneTokenForDecode(BatchBuilder):
    def build(self, *args) -> ScheduleBatch:
        batch = super().build(*args)
        if (np.diff(batch.token_offsets) == 1).all():
            batch.forward_mode = ForwardMode.DECODE
        return batch


class ContinuesOldTokens(BatchBuilder):
    def build(self, step: int, rows, chosen, chunks, collected: int, saves=None) -> ScheduleBatch:
        return super().build(step, rows, chosen, chunks, step, saves)


class KeepsComposition(BatchBuilder):
    def _set_rows(self, requests: list[Request], has_chunks: bool) -> None:
        composition = self._composition
        super()._set_rows(requests, has_chunks)
        self._composition = min(self._composition, composition + (len(requests) > 1))


class SendsOnlyThePromptsHistory(BatchBuilder):
    def build(self, *args) -> ScheduleBatch:
        batch = super().build(*args)
        if batch.history_ids is not None and batch.history_offsets is not None:
            parts = np.split(batch.history_ids, batch.history_offsets[1:-1])
            parts = [part[: len(row.prompt_ids)] for part, row in zip(parts, self.requests, strict=True)]
            batch.history_ids = np.concatenate(parts)
            batch.history_offsets = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        return batch


class IgnoresLookahead(PrefixCache):
    def key(self, tokens: np.ndarray, index: int) -> bytes:
        start = index * self.page_size
        return tokens[start : start + self.page_size].tobytes()


class IgnoresWhatCameBefore(PrefixCache):
    def match(self, tokens: np.ndarray) -> list[Node]:
        nodes, stack = {}, [self.root]
        while stack:
            node = stack.pop()
            nodes[node.key] = node
            stack.extend(node.children.values())
        path = []
        for index in range((len(tokens) - max(1, self.lookahead)) // self.page_size):
            found = nodes.get(self.key(tokens, index))
            if found is None:
                break
            path.append(found)
        return path


class LeavesNothingToCompute(PrefixCache):
    def match(self, tokens: np.ndarray) -> list[Node]:
        return super().match(np.append(tokens, tokens[-1:]).astype(np.int32))


class EvictsPagesInUse(PrefixCache):
    def _evictable(self, node: Node) -> bool:
        return node.parent is not None and not node.children

    def insert(self, parent: Node, key: bytes, page: int) -> Node:
        node = super().insert(parent, key, page)
        self._offer(node)
        return node


class PublishesIncompletePages(Memory):
    def _publish(self, request: Request, cells: int, leaving: bool) -> list[int]:
        return super()._publish(request, cells + self.page_size, leaving)


class PublishesBeforeLookahead(Memory):
    def _publish(self, request: Request, cells: int, leaving: bool) -> list[int]:
        return super()._publish(request, cells + self.cache.lookahead, leaving)


class InsertsTwice(Memory):
    def _publish(self, request: Request, cells: int, leaving: bool) -> list[int]:
        if request.held.node is not None and not leaving:
            request.held.node.children.clear()
        return super()._publish(request, cells, leaving)


class SharesUnscoredPrompts(Memory):
    def admit(self, request: Request, promised: int) -> bool:
        admitted = super().admit(request, promised)
        if admitted and request.scores_prompt and self.caches:
            self.cache.leave(request.held.node)
            path = self._match(request)
            self.cache.use(path)
            request.held.node = path[-1] if path else self.cache.root
            request.held.pages = [node.page for node in path]
            request.held.shared, request.held.num_cells = len(path), len(path) * self.page_size
        return admitted


SCHEDULER, RUNNING, BUILDER, MEMORY, CACHE = "", "running", "_builder", "running.memory", "running.memory.cache"
MUTANTS = (
    (PublishesBeforeCollect, SCHEDULER, "before its writer is collected"),
    (TakesStaleTokens, SCHEDULER, "outputs and results differ"),
    (ForgetsToMarkStale, SCHEDULER, "has outputs after its end"),
    (FreesBeforeCollect, RUNNING, "still reads it"),
    (FreesBeforeCollect, RUNNING, "reused while in flight"),
    (LeaksAbortedSlots, RUNNING, "slots lost"),
    (LosesPages, RUNNING, "distinct pages"),
    (ForgetsOutputsOnRetraction, RUNNING, "outputs and results differ"),
    (RecomputesOnlyThePrompt, RUNNING, ""),
    (NeverRetracts, RUNNING, "nothing can run"),
    (ForgetsPromises, RUNNING, "pages are promised"),
    (PublishesWhatFailed, RUNNING, "another request's tokens"),
    (KeepsScoresOfBefore, RUNNING, ""),
    (AsksForScoresAgain, BUILDER, "asks again"),
    (DropsPageDifferences, BUILDER, "beyond the page table"),
    (CountsPagesAfterTheStep, BUILDER, "the device has"),
    (TakesOneTokenForDecode, BUILDER, "a row decodes that has sampled nothing"),
    (ContinuesOldTokens, BUILDER, "instead of the last sampled"),
    (KeepsComposition, BUILDER, "one composition"),
    (SendsOnlyThePromptsHistory, BUILDER, "is not complete"),
    (IgnoresLookahead, CACHE, "other following tokens"),
    (IgnoresWhatCameBefore, CACHE, "another request's tokens"),
    (LeavesNothingToCompute, CACHE, "rows without tokens"),
    (EvictsPagesInUse, CACHE, "still reads it"),
    (PublishesIncompletePages, MEMORY, ""),
    (PublishesBeforeLookahead, MEMORY, ""),
    (InsertsTwice, MEMORY, "distinct pages"),
    (SharesUnscoredPrompts, MEMORY, ""),
)


NEAREST = MappingProxyType(
    {
        PublishesBeforeCollect: 55,
        FreesBeforeCollect: 10,
        ForgetsOutputsOnRetraction: 26,
        RecomputesOnlyThePrompt: 22,
        NeverRetracts: 22,
        ForgetsPromises: 9,
        PublishesWhatFailed: 52,
        KeepsScoresOfBefore: 126,
        AsksForScoresAgain: 50,
        SendsOnlyThePromptsHistory: 50,
        IgnoresWhatCameBefore: 13,
        LeavesNothingToCompute: 14,
        PublishesIncompletePages: 13,
        PublishesBeforeLookahead: 18,
    }
)
"""Seeds that caught bugs which most seeds miss. They are tried first, then all others."""


@pytest.mark.parametrize(("kind", "path", "message"), MUTANTS)
def test_a_planted_bug_is_caught_by_some_trace(kind: type, path: str, message: str) -> None:
    check_caught(lambda seed: draw_trace(Random(seed)), SEEDS, plant(kind, path), message, NEAREST.get(kind))
