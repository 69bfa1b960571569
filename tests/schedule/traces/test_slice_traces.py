"""Random traces on a worker that prefills in layer slices between decode steps. Schedulers with one
planted bug must be caught."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglcore.core.errors import ConfigError
from sglcore.schedule.layered_prefill.slice_choice import Slicing
from sglcore.schedule.request import Request
from sglcore.schedule.result_checks import check_limits
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.sliced_prompt import SlicedPrompt
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from tests.schedule.fake_slices import FakeSlicedWorker
from tests.schedule.fake_worker import FakeMatcher, make_limits, make_params
from tests.schedule.trace import Trace, check_caught, draw_trace, plant, play, with_windows
from tests.schedule.traces.test_state_traces import draw as draw_conversations

SEEDS = range(3000, 3300)


def by_slices(rnd: Random, trace: Trace) -> Trace:
    """The trace on a worker that has some layers and slices."""
    for _, request in trace.arrivals:
        if request.task == "generate" and rnd.random() < 0.1:
            request.matcher = FakeMatcher(request)
    layers, budget = rnd.choice([1, 2, 3, 5, 8]), rnd.choice([1, 1, 4, 12])
    return replace(trace, limits=replace(trace.limits, sliced_layers=layers, slice_budget=budget))


def draw_crowd(rnd: Random) -> Trace:
    """A trace of prompts that arrive together while one request decodes; some end soon."""
    trace = draw_trace(rnd)
    small = {"max_model_len": 28, "max_requests": 5, "max_batch_tokens": 20, "num_pages": 28 + rnd.choice([0, 8, 60])}
    limits = replace(trace.limits, page_size=rnd.choice([1, 2]), window=0, num_window_pages=0, **small)
    first = Request("first", np.arange(rnd.randint(1, 4), dtype=np.int32), make_params(None), seed=rnd.randint(0, 99))
    arrivals, ends = [(0, first)], list[tuple[int, Request, str]]()
    for index in range(rnd.randint(2, 6)):
        prompt = np.array([rnd.randint(0, 29) for _ in range(rnd.randint(2, 9))], dtype=np.int32)
        request = Request(f"r{index}", prompt, make_params(rnd.choice([1, 3, None])), seed=rnd.randint(0, 99))
        arrivals.append((rnd.choice([3, 3, 9]), request))
        if rnd.random() < 0.5:
            ends.append((arrivals[-1][0] + rnd.randint(1, 9), request, "abort"))
    return replace(trace, limits=limits, arrivals=sorted(arrivals, key=lambda each: each[0]), ends=ends)


def draw(seed: int) -> Trace:
    """A trace with layer slices: of independent prompts, of conversations with states, or of a
    crowd; some with sliding windows."""
    rnd = Random(seed)
    kind = rnd.random()
    trace = draw_conversations(seed) if kind < 0.3 else draw_crowd(rnd) if kind < 0.6 else draw_trace(rnd)
    if not trace.limits.keeps_state and rnd.random() < 0.3:
        trace = replace(trace, limits=with_windows(rnd, trace.limits))
    return by_slices(rnd, trace)


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=False))
def test_any_trace_ends_as_if_every_request_had_run_alone(rnd: Random) -> None:
    play(by_slices(rnd, draw_trace(rnd)))


@pytest.mark.parametrize("seed", SEEDS[:80])
def test_seeded_traces_end_as_if_every_request_had_run_alone(seed: int) -> None:
    print("seed", seed)
    play(draw(seed))


def test_the_traces_reach_what_they_are_meant_to_reach() -> None:
    names = ("sliced", "given up", "retracted", "overlapped", "windows", "states", "hits", "decode between")
    seen = dict.fromkeys(names, 0)
    for seed in SEEDS[:150]:
        outcome = play(draw(seed))
        worker, stats = outcome.worker, outcome.scheduler.stats()
        assert isinstance(worker, FakeSlicedWorker)
        slices, total = vars(worker).get("slices", []), outcome.trace.limits.sliced_layers
        seen["sliced"] += bool(slices)
        seen["given up"] += sum(first == 0 for first, _ in slices) > sum(last == total for _, last in slices)
        seen["retracted"] += bool(slices) and stats.retractions > 0
        seen["overlapped"] += bool(slices) and worker.most_in_flight > 1
        seen["windows"] += bool(slices) and outcome.trace.limits.num_window_pages > 0
        seen["states"] += bool(slices) and outcome.trace.limits.keeps_state
        seen["hits"] += bool(slices) and stats.hit_tokens > 0
        seen["decode between"] += has_decode_between(worker.seen)
        assert ForwardMode.MIXED not in worker.modes
    assert min(seen.values()) >= 5, seen


def has_decode_between(steps: list[ScheduleBatch]) -> bool:
    """Whether a decode step ran between two slices of a prompt."""
    open_prompt = decoded = False
    for step in steps:
        if step.layers is None:
            decoded = decoded or (open_prompt and step.forward_mode.is_decode)
        elif step.layers[0] == 0:
            open_prompt, decoded = True, False
        elif decoded:
            return True
    return False


def test_a_prompt_that_runs_while_others_decode_waits_for_one_of_their_steps_at_a_time() -> None:
    for seed in SEEDS[:60]:
        outcome = play(draw(seed))
        was_slice = False
        for step in outcome.worker.seen:
            is_partial = step.layers is not None and step.layers[1] < outcome.trace.limits.sliced_layers
            assert not (was_slice and step.layers is not None and step.layers[0] > 0 and is_partial), (
                "two slices in a row beside decode rows"
            )
            was_slice = is_partial


def test_a_worker_that_proposes_takes_no_slices() -> None:
    with pytest.raises(ConfigError, match="drafts tokens and takes prompts in slices"):
        check_limits(make_limits(sliced_layers=2, draft_tokens=1))


class GivesBackAtOnce(RunningRequests):
    def _leave_sliced(self, sliced: SlicedPrompt, request: Request) -> None:
        self._release(request)
        super()._leave_sliced(sliced, request)
        if request in sliced.released:
            sliced.released.remove(request)


class KeepsWhoLeft(RunningRequests):
    """Requests that left an open prompt are never released."""

    def end_sliced(self, record: BatchRecord, sliced: SlicedPrompt) -> list[tuple[Request, int]]:
        sliced.released, gone = [], sliced.released
        chunks = super().end_sliced(record, sliced)
        sliced.released = gone
        return chunks


class AdvancesWhoLeft(RunningRequests):
    def end_sliced(self, record: BatchRecord, sliced: SlicedPrompt) -> list[tuple[Request, int]]:
        super().end_sliced(record, sliced)
        return sliced.chunks


class SkipsALayer(Slicing):
    def _advance(self, running: RunningRequests, sliced: SlicedPrompt, record: BatchRecord) -> None:
        sliced.done += 1 if 0 < sliced.done < self.total - 1 else 0
        super()._advance(running, sliced, record)


class AdvancesAtTheFirstSlice(Scheduler):
    """The chunk counts as computed when its first layers run."""

    def _advance(self, decodes: bool, served: bool, chunks: list[tuple[Request, int]]) -> ScheduleBatch | None:
        batch = super()._advance(decodes, served, chunks)
        if batch is not None and batch.layers is not None:
            self._advance_chunks(self.in_flight.newest, chunks)
        return batch


class ForgetsWindows(RunningRequests):
    """The chunk of the last slice does not advance its sliding window."""

    def end_sliced(self, record: BatchRecord, sliced: SlicedPrompt) -> list[tuple[Request, int]]:
        known = list(self._chunked)
        chunks = super().end_sliced(record, sliced)
        self._chunked[:] = known
        return chunks


PLANTED = [
    (GivesBackAtOnce, "running", ""),
    (KeepsWhoLeft, "running", "held twice"),
    (AdvancesWhoLeft, "running", ""),
    (SkipsALayer, "_prefill", "have run"),
    (AdvancesAtTheFirstSlice, "", ""),
    (ForgetsWindows, "running", "window"),
]


@pytest.mark.parametrize(("kind", "path", "message"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_caught(kind: type, path: str, message: str) -> None:
    check_caught(draw, SEEDS, plant(kind, path), message)
