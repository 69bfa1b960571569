"""Random traces of a scheduler: arrivals, aborts, stops, failures and tiny pools, played against
the checking worker.

A trace is drawn from any object with `randint`, `choice` and `random`: a seeded generator or
hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest

from sglcore.engine.output_processor import HiddenParts
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.cache.shared_pages import least_pages, least_window_pages
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.request_output import EngineOutput
from sglcore.schedule.running_requests import RunningRequests
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.step_loop import Loop
from sglcore.schedule.steps_in_flight import BatchRecord
from sglcore.worker.model_worker import Limits, TokenLogprobs
from tests.schedule.fake_speculation import Accepts, make_worker
from tests.schedule.fake_worker import FakeMatcher, FakeWorker, compose, make_limits, make_params, make_states

VOCABULARY = 30


@dataclass
class Trace:
    """The events of a run: `arrivals` are (tick, request); `ends` are (tick, request, how)."""

    limits: Limits
    prefix_cache: bool
    overlap: bool
    arrivals: list[tuple[int, Request]]
    ends: list[tuple[int, Request, str]]
    fail_submit: set[int]
    fail_collect: set[int]
    bad_requests: set[str]
    accepts: Accepts = "some"


@dataclass
class Outcome:
    """The results of a run: every output, and the number of ticks with work."""

    trace: Trace
    worker: FakeWorker
    scheduler: Scheduler
    ticks: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, int] = field(default_factory=dict)
    states: dict[str, HiddenParts] = field(default_factory=dict)

    def take(self, outputs: list[EngineOutput]) -> None:
        """Record outputs; tokens after the end of a request are an error."""
        for output in outputs:
            rid = output.request_id
            assert not self.finishes.get(rid), f"{rid} has outputs after its end"
            self.tokens.setdefault(rid, []).extend(output.token_ids)
            scores = [score.token_id for score in output.logprobs or ()]
            assert scores == [-score.logprob for score in output.logprobs or ()]
            assert output.logprobs is None or scores == output.token_ids, f"{rid} has scores of {scores}"
            wanted = self.scheduler_params(rid).return_hidden_states
            self.states.setdefault(rid, HiddenParts(wanted)).take(output, len(output.token_ids), output.finished)
            self.finishes[rid] = self.finishes.get(rid, 0) + output.finished

    def scheduler_params(self, rid: str) -> SamplingParams:
        """The sampling parameters of a request."""
        return next(request.params for _, request in self.trace.arrivals if request.rid == rid)


def draw_trace(rnd: Random) -> Trace:
    """A small random trace; its sizes are small so that events collide."""
    context = rnd.choice([12, 20, 28])
    page_size = rnd.choice([1, 2, 4])
    limits = make_limits(
        max_model_len=context,
        page_size=page_size,
        num_pages=-(-context // page_size) + rnd.choice([0, 0, 1, 2, 4, 12, 40]),
        max_requests=rnd.choice([1, 2, 4, 6]),
        max_batch_tokens=rnd.choice([1, 2, 3, 6, 20]),
        allows_mixed_batches=rnd.random() < 0.6,
        can_overlap=rnd.random() < 0.8,
        lookahead=rnd.choice([0, 0, 1, 2]),
        vocab_size=VOCABULARY,
    )
    arrivals = _draw_arrivals(rnd, limits)
    requests = [request for _, request in arrivals]
    ends = [(rnd.randint(0, 30), request, rnd.choice(["abort", "stop"])) for request in requests if rnd.random() < 0.25]
    failing = rnd.random() < 0.15
    trace = Trace(
        limits,
        prefix_cache=rnd.random() < 0.75,
        overlap=rnd.random() < 0.8,
        arrivals=arrivals,
        ends=ends,
        fail_submit={rnd.randint(1, 20)} if failing else set(),
        fail_collect={rnd.randint(1, 20)} if failing and rnd.random() < 0.5 else set(),
        bad_requests={request.rid for request in requests if rnd.random() < 0.04},
    )
    if rnd.random() < 0.25:
        trace.limits = replace(limits, keeps_state=True, num_snapshots=rnd.choice([0, 1, 2, 3, 6, 20]))
    if rnd.random() < 0.25:
        trace.limits = with_windows(rnd, trace.limits)
    return trace


def with_windows(rnd: Random, limits: Limits) -> Limits:
    """The limits of a worker with window pages, with few more than one request needs."""
    limits = replace(limits, window=rnd.choice([1, 2, 3, 5, 9, 14]))
    return replace(limits, num_window_pages=least_window_pages(limits) + rnd.choice([0, 0, 1, 3, 10, 40]))


def with_shared_pages(rnd: Random, limits: Limits) -> Limits:
    """The limits of a worker with window pages that share memory with the others, with little more
    than one request needs."""
    limits = replace(limits, window=rnd.choice([1, 2, 3, 5, 9, 14]), window_unit=rnd.choice([1, 1, 2, 3, 5]))
    pages = least_pages(limits) + rnd.choice([0, 0, 1, 3, 10, 40]) * limits.window_unit
    return replace(limits, num_pages=pages, num_window_pages=(pages + 1) // limits.window_unit - 1)


def with_proposals(rnd: Random, trace: Trace, draft_tokens: int, *, grammars: float = 0.1) -> Trace:
    """The trace on a worker with `draft_tokens` draft tokens per request (0: the trace unchanged);
    `grammars` is the share of requests with a grammar."""
    if not draft_tokens:
        return trace
    for _, request in trace.arrivals:
        if request.task == "generate" and rnd.random() < grammars:
            request.matcher = FakeMatcher(request, rnd.choice([None, None, 2]))
    limits = replace(
        trace.limits,
        draft_tokens=draft_tokens,
        lookahead=rnd.choice([0, 1]),
        keeps_history=rnd.random() < 0.5,
        allows_mixed_batches=False,
        keeps_state=False,
        num_snapshots=0,
        window=0,
        num_window_pages=0,
    )
    return replace(trace, limits=limits, accepts=rnd.choice(["some", "some", "all", "none"]))


def with_hidden_states(rnd: Random, trace: Trace) -> Trace:
    """The trace with hidden states for most requests."""
    for _, request in trace.arrivals:
        wanted = None if request.task == "embed" else rnd.choice(["all", "all", "last", None])
        before = wanted is not None and rnd.random() < 0.3
        request.params = replace(request.params, return_hidden_states=wanted, return_hidden_states_before_norm=before)
    return replace(trace, limits=replace(trace.limits, hidden_size=3, gives_norm_inputs=True))


def _draw_arrivals(rnd: Random, limits: Limits) -> list[tuple[int, Request]]:
    common = [rnd.randint(0, VOCABULARY - 1) for _ in range(limits.max_model_len)]
    arrivals: list[tuple[int, Request]] = []
    for index in range(rnd.randint(1, 7)):
        tick = rnd.randint(0, 15)
        shared = common[: rnd.randint(0, limits.max_model_len - 4)]
        prompt = np.array(shared + [rnd.randint(0, 2) for _ in range(rnd.randint(1, 3))], dtype=np.int32)
        if rnd.random() < 0.1:
            prompt = prompt[: limits.max_batch_tokens]
            arrivals.append((tick, Request(f"e{index}", prompt, make_params(), task="embed")))
            continue
        leader = None
        for sibling in range(rnd.choice([1, 1, 1, 3])):
            request = _draw_request(rnd, f"r{index}.{sibling}", prompt, leader)
            leader = leader or request
            arrivals.append((tick, request))
    return sorted(arrivals, key=lambda arrival: arrival[0])


def _draw_request(rnd: Random, rid: str, prompt: np.ndarray, leader: Request | None) -> Request:
    params = make_params(
        rnd.choice([1, 2, 6, None, None]),
        needs_history=rnd.random() < 0.2,
        logprobs=rnd.choice([None, None, 0, 2]),
        prompt_logprobs=rnd.choice([None, None, None, 0, 2]),
    )
    stop_ids = frozenset(rnd.randint(0, VOCABULARY - 1) for _ in range(rnd.choice([0, 1, 4])))
    return Request(rid, prompt, params, seed=rnd.randint(0, 99), stop_ids=stop_ids, leader=leader)


def play(trace: Trace, plant: Callable[[Scheduler], None] | None = None) -> Outcome:
    """Run a trace to its end and check every step. `plant` puts a bug into the scheduler."""
    worker = make_worker(trace.limits, trace.accepts)
    worker.fail_submit, worker.fail_collect = trace.fail_submit, trace.fail_collect
    worker.bad_requests = trace.bad_requests
    scheduler = make_scheduler(trace.limits, prefix_cache=trace.prefix_cache, compose=compose)
    if plant is not None:
        plant(scheduler)
    loop = WatchedLoop(scheduler, worker, overlap=trace.overlap)
    loop.outcome = outcome = Outcome(trace, worker, scheduler)
    last_tick = max([tick for tick, _ in trace.arrivals] + [tick for tick, *_ in trace.ends])
    tick = 0
    while tick <= last_tick or loop.has_work:
        _happen(outcome, tick)
        if loop.has_work:
            _step(outcome, loop)
        scheduler.audit()
        tick += 1
        assert outcome.ticks < most_ticks(trace), f"no end in sight: {scheduler.stats()}"
    check(outcome)
    return outcome


def plant(kind: type, path: str) -> Callable[[Scheduler], None]:
    """Make a function that turns a part of a scheduler, named by its path ("": the scheduler), into
    one of class `kind`."""

    def plant_in(scheduler: Scheduler) -> None:
        part: object = scheduler
        for name in path.split(".") if path else ():
            part = getattr(part, name)
        part.__class__ = kind

    return plant_in


def check_caught(
    draw: Callable[[int], Trace],
    seeds: Iterable[int],
    planted: Callable[[Scheduler], None],
    message: str,
    nearest: int | None = None,
) -> None:
    """Fail unless the trace of some seed ends in an error that contains `message`. `nearest`: a
    seed known to do so, tried first."""
    for seed in (*(() if nearest is None else (nearest,)), *seeds):
        try:
            play(draw(seed), planted)
        except Exception as error:
            if message in str(error):
                print(f"caught by seed {seed}: {type(error).__name__}: {error}")
                return
    pytest.fail(f"no trace of seeds {seeds} noticed")


def most_ticks(trace: Trace) -> int:
    """More steps than the worst trace should need: each request alone, token by token, with some
    recomputation."""
    return 40 + 2 * trace.limits.max_model_len * len(trace.arrivals)


def _happen(outcome: Outcome, tick: int) -> None:
    for when, request in outcome.trace.arrivals:
        if when == tick:
            outcome.scheduler.add(request)
    for when, request, how in outcome.trace.ends:
        if when == tick and request.arrival >= 0:
            end = outcome.scheduler.abort if how == "abort" else lambda rid: outcome.scheduler.stop(rid, "text")
            output = end(request.rid)
            outcome.take([output] if output else [])


class WatchedLoop(Loop):
    """Checks each step when it is planned."""

    outcome: Outcome

    def _submit(self) -> BatchRecord | None:
        before = _computing(self.outcome)
        planned = super()._submit()
        if _computing(self.outcome) - before:
            _check_promises(self.outcome)
        return planned


def _step(outcome: Outcome, loop: Loop) -> None:
    outcome.ticks += 1
    _loop_step(outcome, loop)


def _computing(outcome: Outcome) -> set[Request]:
    running = outcome.scheduler.running
    return {*running.extending, *running.rows.requests}


def _check_promises(outcome: Outcome) -> None:
    """After an admission, the free pages cover the known tokens of all prompts and one step of each
    other running request."""
    memory, running = outcome.scheduler.running.memory, outcome.scheduler.running
    owed = sum(memory.pages_for(request.num_tokens) - len(request.held.pages) for request in running.extending)
    step = memory.pages_for(1 + 2 * outcome.trace.limits.draft_tokens)
    promised = owed + (len(_computing(outcome)) - 1) * step
    message = f"{promised} pages are promised, {memory.available} are there"
    if memory.shared is None:
        assert promised <= memory.available, message
    else:
        assert memory.shared.will_fit(promised, 0, windows_back=_windows_back(running)), message


def _windows_back(running: RunningRequests) -> int:
    """The number of window pages that only the chunks of the planned step need: they are freed
    before the next one is planned."""
    windows, back = running.memory.windows, 0
    ends = {request: request.held.num_cells for request in running._chunked}
    if running.sliced is not None:
        ends |= {request: request.held.num_cells + count for request, count in running.sliced.staying}
    for request, end in ends.items():
        first = windows.first_seen((end - windows._lookahead) // windows._page_size)
        back += max(0, first - request.held.windows.first)
    return back


def _loop_step(outcome: Outcome, loop: Loop) -> None:
    try:
        outcome.take(loop.step())
    except RuntimeError as error:
        if "planned failure" not in str(error):
            raise
        outcome.take(loop.drain())


def check(outcome: Outcome) -> None:
    """Check that each request ended once with the tokens of the request alone, and that nothing is
    held any more."""
    stats = outcome.scheduler.stats()
    held = stats.num_pages - stats.free_pages - stats.cached_pages
    assert (held, stats.running, stats.waiting, stats.in_flight) == (0, 0, 0, 0), stats
    assert stats.unused_cached_pages == stats.cached_pages, stats
    if not outcome.trace.limits.window_unit:
        assert stats.free_window_pages + stats.cached_window_pages == stats.num_window_pages, stats
    assert outcome.trace.prefix_cache or stats.cached_pages == 0
    assert len(outcome.worker.in_flight) == 0
    for _, request in outcome.trace.arrivals:
        assert outcome.finishes.get(request.rid) == 1, f"{request.rid} ended {outcome.finishes.get(request.rid)} times"
        assert outcome.tokens.get(request.rid, []) == request.output_ids, f"{request.rid}: outputs and results differ"
        assert not request.held.pages and not request.held.windows.pages and not request.held.windows.kept, (
            f"{request.rid} holds pages"
        )
        _check_request(outcome, request)


def _check_request(outcome: Outcome, request: Request) -> None:
    if request.task == "embed":
        if request.finish_reason == "stop" and request.stop_cause is None:
            assert request.embedding is not None
            assert request.embedding.tolist() == [request.prompt_ids.sum(), len(request.prompt_ids)]
        return
    _check_states(outcome, request)
    wanted, reason = outcome.worker.truth.output(request, outcome.trace.limits.max_model_len)
    if request.finish_reason in ("abort", "error") or request.stop_cause == "text":
        assert request.output_ids == wanted[: len(request.output_ids)], (
            f"{request.rid} is not a prefix of its run alone"
        )
        return
    assert (request.output_ids, request.finish_reason) == (wanted, reason), f"{request.rid} differs from its run alone"
    _check_scores(request)


def _check_states(outcome: Outcome, request: Request) -> None:
    """Check that the request has exactly the states that it wants, those of its tokens but the
    last."""
    params, states = request.params, outcome.states[request.rid].whole()
    if params.return_hidden_states is None or not request.output_ids:
        assert states is None, f"{request.rid} has states"
        return
    length = len(request.prompt_ids) + len(request.output_ids) - 1
    digests = outcome.worker.truth.digests(request, length)
    start = length - 1 if params.return_hidden_states == "last" else 0
    wanted = make_states(digests, start, params.return_hidden_states_before_norm)
    assert states is not None and states.tolist() == wanted.tolist(), f"{request.rid} has other states"


def _check_scores(request: Request) -> None:
    output = _join_logprobs(request.logprobs)
    if request.params.logprobs is None:
        assert output is None
    else:
        assert output is not None and (-output.chosen).tolist() == request.output_ids
        assert output.top_ids.shape == (len(request.output_ids), request.params.logprobs)
    prompt = _join_logprobs(request.prompt_logprobs)
    if request.params.prompt_logprobs is None or len(request.prompt_ids) == 1:
        assert prompt is None
    else:
        assert prompt is not None and (-prompt.chosen).tolist() == request.prompt_ids[1:].tolist()
        assert prompt.top_ids.shape == (len(request.prompt_ids) - 1, request.params.prompt_logprobs)


def _join_logprobs(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    """One record for all tokens of `parts` (all with the same number of alternatives); None if
    there are no tokens."""
    if not parts:
        return None
    return TokenLogprobs(
        np.concatenate([part.chosen for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )
