"""Random traces of requests for hidden states: whatever else happens, each request gets those of
its own tokens, once each."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from sglcore.schedule.batch_builder import BatchBuilder
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.decode_rows import DecodeRows
from sglcore.schedule.request import Request
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.model_worker import BatchResult
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.schedule.trace import Trace, check_caught, draw_trace, plant, play, with_hidden_states, with_proposals

SEEDS = range(200)


def draw(seed: int) -> Trace:
    """A trace with hidden states, some with draft tokens or prompts in slices of layers."""
    rnd = Random(seed)
    trace = with_proposals(rnd, draw_trace(rnd), rnd.choice([0, 0, 1, 3]))
    if not trace.limits.draft_tokens and rnd.random() < 0.3:
        trace.limits = replace(trace.limits, sliced_layers=rnd.choice([2, 5]), slice_budget=rnd.choice([1, 4]))
    return with_hidden_states(rnd, trace)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_each_request_has_the_states_of_its_own_tokens(first: int) -> None:
    for seed in range(first, first + 20):
        print("seed", seed)
        play(draw(seed))


def test_the_traces_reach_what_they_are_meant_to_reach() -> None:
    seen = dict.fromkeys(("retractions", "hit_tokens", "drafts", "slices", "overlapped"), 0)
    for seed in range(100):
        outcome = play(draw(seed))
        stats = outcome.scheduler.stats()
        seen["retractions"] += stats.retractions > 0
        seen["hit_tokens"] += stats.hit_tokens > 0
        seen["drafts"] += outcome.trace.limits.draft_tokens > 0
        seen["slices"] += outcome.trace.limits.sliced_layers > 0
        seen["overlapped"] += outcome.worker.most_in_flight > 1
    assert min(seen.values()) >= 5, seen


class SharesThePrompt(Memory):
    def admit(self, request: Request, promised: int, promised_windows: int = 0) -> bool:
        known, request.num_hidden = request.num_hidden, len(request.prompt_ids)
        try:
            return super().admit(request, promised, promised_windows)
        finally:
            request.num_hidden = known


class CountsFromZero(Scheduler):
    def _take_rows(self, record: BatchRecord, result: BatchResult, first: int) -> list[EngineOutput]:
        for request, (start, _) in zip(
            record.requests[len(record.requests) - len(record.spans) :], record.spans, strict=True
        ):
            request.num_hidden = start
        return super()._take_rows(record, result, first)


class AsksOnce(BatchBuilder):
    def build_decode(
        self, step: int, rows: DecodeRows, collected: int, saves: NDArray[np.int32] | None = None
    ) -> ScheduleBatch:
        is_steady = self._steady is not None
        batch = super().build_decode(step, rows, collected, saves)
        if is_steady:
            batch.capture_hidden_mode.take()
        return batch


class ForgetsTheNorm(BatchBuilder):
    def build_decode(
        self, step: int, rows: DecodeRows, collected: int, saves: NDArray[np.int32] | None = None
    ) -> ScheduleBatch:
        batch = super().build_decode(step, rows, collected, saves)
        batch.return_hidden_states_before_norm.take()
        return batch


class LosesStates(Scheduler):
    def finish(self, record: BatchRecord, result: BatchResult) -> list[EngineOutput]:
        return super().finish(record, result if record.spans else replace(result, hidden_states={}))


MUTANTS = (
    (SharesThePrompt, "running.memory", "has other states"),
    (CountsFromZero, "", "has other states"),
    (AsksOnce, "_builder", "modes of rows without a mode"),
    (ForgetsTheNorm, "_builder", "norm inputs are wanted of no row"),
    (LosesStates, "", "lacks the hidden states of rows"),
)


@pytest.mark.parametrize(("kind", "path", "message"), MUTANTS)
def test_a_planted_bug_is_caught(kind: type, path: str, message: str) -> None:
    check_caught(draw, SEEDS, plant(kind, path), message)
