"""Random traces of a started device: arrivals, aborts, stops, shared prefixes, too few pages. A
request always gets the same tokens and log-probabilities as alone, and every page and slot is
freed. Does not use torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from devices.mlx.tests.parity import SPOILED, TokenEngine, check_same, write_tiny
from sglcore.conformance.inputs.prompts import FIRST_TOKEN, VOCAB, random_prompts
from sglcore.conformance.mutants.mutants_worker import (
    Changed,
    KeepsOldPages,
    LosesSharedPages,
    NeighbouringPages,
    OneLengthForAll,
    OnePositionLate,
    RestartsChunks,
    SeedsByRow,
    SwapsRows,
)
from sglcore.conformance.recording_worker import RecordingWorker
from sglcore.conformance.session import Drive, Result, open_session, result_of
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Request
from sglcore.schedule.scheduler import Scheduler
from sglcore.schedule.scheduler_stats import SchedulerStats
from sglcore.worker.schedule_batch import ScheduleBatch
from sglcore_mlx.stepper import Stepper

CONTEXT = 48
PAGE_SIZE = 4
TOLERANCE = 1e-4
"""Tolerance in nats between float32 sums computed with different shapes."""

SEEDS = range(24)
MOST_TICKS = 1500


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at a tick. `leader`: the index of a sibling with the same prompt, or
    None."""

    tick: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    sample_index: int
    stop_ids: frozenset[int]
    leader: int | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """The events of a trace: `ends` are (tick, index of the request, "abort" or "stop")."""

    drive: Drive
    arrivals: tuple[Arrival, ...]
    ends: tuple[tuple[int, int, str], ...]


@dataclass(slots=True)
class Lived:
    """The result of each request of a trace, and the scheduler's counts at its end."""

    results: list[Result]
    stats: SchedulerStats


def draw_life(rnd: Random) -> Life:
    """Return a random trace, with sizes so small that requests often affect each other."""
    pages = CONTEXT // PAGE_SIZE + rnd.choice([0, 1, 2, 5, 20])
    drive = Drive(chunk=rnd.choice([1, 2, 5, 16, 64]), pages=pages, prefix_cache=rnd.random() < 0.7)
    common = [rnd.randrange(FIRST_TOKEN, VOCAB) for _ in range(CONTEXT)]
    arrivals: list[Arrival] = []
    for _ in range(rnd.randint(2, 5)):
        arrivals += _draw_siblings(rnd, common, len(arrivals))
    ends = [(rnd.randint(0, 25), place, rnd.choice(["abort", "stop"])) for place in range(len(arrivals))]
    return Life(drive, tuple(arrivals), tuple(end for end in ends if rnd.random() < 0.2))


def _draw_siblings(rnd: Random, common: Sequence[int], place: int) -> list[Arrival]:
    own = [rnd.randrange(FIRST_TOKEN, VOCAB) for _ in range(rnd.randint(1, 4))]
    prompt = (*common[: rnd.choice([0, 3, 8, 17, 26])], *own)
    tick, params, seed = rnd.randint(0, 12), _draw_params(rnd), rnd.randrange(2**64)
    stops = frozenset(rnd.randrange(VOCAB) for _ in range(rnd.choice([0, 0, 6])))
    return [
        Arrival(tick, prompt, params, seed, index, stops, place if index else None)
        for index in range(rnd.choice([1, 1, 1, 2]))
    ]


def _draw_params(rnd: Random) -> SamplingParams:
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 9, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.8, "frequency_penalty": 0.3},
        {"temperature": 0.8, "logit_bias": {5: 3.0, 6: -50.0}, "min_tokens": 4},
    )
    scored = {"logprobs": rnd.choice([0, 0, 3]), "prompt_logprobs": rnd.choice([None, None, 0])}
    return SamplingParams(max_tokens=rnd.choice([4, 9, 14, None]), **rnd.choice(kinds), **scored)


def make_request(place: int, arrival: Arrival, leader: Request | None = None) -> Request:
    """Return the scheduler's request."""
    prompt = np.array(arrival.prompt, np.int32)
    return Request(
        f"r{place}", prompt, arrival.params, arrival.seed, arrival.sample_index, arrival.stop_ids, leader=leader
    )


def play(recorder: RecordingWorker, life: Life, *, overlap: bool) -> Lived:
    """Run a trace to its end, counting all pages and slots after every step."""
    session = open_session(recorder, replace(life.drive, overlap=overlap))
    scheduler, loop = session.scheduler, session.loop
    requests: list[Request] = []
    for place, arrival in enumerate(life.arrivals):
        requests.append(make_request(place, arrival, None if arrival.leader is None else requests[arrival.leader]))
    last = max([arrival.tick for arrival in life.arrivals] + [tick for tick, *_ in life.ends])
    tick = 0
    while tick <= last or loop.has_work:
        _happen(scheduler, life, requests, tick)
        if loop.has_work:
            loop.step()
        scheduler.audit()
        tick += 1
        assert tick < MOST_TICKS, f"no end in sight: {scheduler.stats()}"
    stats = scheduler.stats()
    assert stats.free_pages + stats.cached_pages == stats.num_pages, stats
    return Lived([result_of(request) for request in requests], stats)


def _happen(scheduler: Scheduler, life: Life, requests: Sequence[Request], tick: int) -> None:
    for arrival, request in zip(life.arrivals, requests, strict=True):
        if arrival.tick == tick:
            scheduler.add(request)
    for when, place, how in life.ends:
        if when == tick and requests[place].arrival >= 0:
            rid = requests[place].rid
            scheduler.abort(rid) if how == "abort" else scheduler.stop(rid, "text")


class Truth:
    """The result of each request alone: whole prompts, all pages, no overlap. Cached, because
    several traces need it."""

    def __init__(self, recorder: RecordingWorker) -> None:
        self._recorder = recorder
        self._known: dict[Arrival, Result] = {}

    def __call__(self, arrival: Arrival) -> Result:
        """Return the result of a trace with this request only."""
        if arrival not in self._known:
            alone = Life(Drive(prefix_cache=False), (replace(arrival, tick=0, leader=None),), ())
            self._known[arrival] = play(self._recorder, alone, overlap=False).results[0]
        return self._known[arrival]


def check_life(life: Life, lived: Lived, truth: Callable[[Arrival], Result]) -> None:
    """Assert that every request has the same tokens and log-probabilities as alone, up to where it
    was aborted or stopped."""
    ended = {place for _, place, _ in life.ends}
    for place, (arrival, found) in enumerate(zip(life.arrivals, lived.results, strict=True)):
        wanted = truth(arrival)
        if place not in ended:
            assert found.finish == wanted.finish, f"request {place} ended by {found.finish}, alone by {wanted.finish}"
        count = len(found.tokens)
        if found.finish == wanted.finish and place not in ended:
            assert count == len(wanted.tokens), f"request {place} has {count} tokens, alone {len(wanted.tokens)}"
        assert found.tokens == wanted.tokens[:count], f"request {place}: {found.tokens}, alone {wanted.tokens}"
        np.testing.assert_allclose(found.logprobs, wanted.logprobs[:count], atol=TOLERANCE, rtol=0)
        scored = len(found.prompt_logprobs)
        np.testing.assert_allclose(found.prompt_logprobs, wanted.prompt_logprobs[:scored], atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def open_engine(folder: Path, **settings: Any) -> TokenEngine:
    """Start a device on a checkpoint, with a short context, and on a CPU with more than one
    stream."""
    fixed = {"max_model_len": CONTEXT, "max_requests": 4, "page_size": PAGE_SIZE, "poison": True, "threads": 2}
    return TokenEngine(folder, **{**fixed, **settings})


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TokenEngine]:
    with open_engine(folder) as made:
        yield made


@pytest.fixture(scope="module")
def truth(engine: TokenEngine) -> Truth:
    return Truth(engine.recorder)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_life_gives_each_request_what_it_gets_alone_with_overlap_and_without(
    engine: TokenEngine, truth: Truth, seed: int
) -> None:
    print("seed", seed)
    life = draw_life(Random(seed))
    both = [play(engine.recorder, life, overlap=overlap) for overlap in (True, False)]
    for lived in both:
        check_life(life, lived, truth)
    ended = {place for _, place, _ in life.ends}
    kept = [place for place in range(len(life.arrivals)) if place not in ended]
    overlapped, serial = ([lived.results[place] for place in kept] for lived in both)
    check_same(overlapped, serial, TOLERANCE)


def test_the_lives_reach_what_they_are_meant_to_reach(engine: TokenEngine) -> None:
    seen: dict[str, int] = dict.fromkeys(("retractions", "hit_tokens", "evicted_pages", "length", "stop", "abort"), 0)
    for seed in SEEDS[:10]:
        lived = play(engine.recorder, draw_life(Random(seed)), overlap=True)
        for name in ("retractions", "hit_tokens", "evicted_pages"):
            seen[name] += getattr(lived.stats, name) > 0
        for result in lived.results:
            seen[result.finish] += 1
    assert min(seen.values()) >= 2, seen


def values(lived: Lived) -> list[tuple[Any, ...]]:
    """Return what a trace gave, without arrays."""
    return [(each.tokens, each.logprobs, each.prompt_logprobs, each.finish, each.cached) for each in lived.results]


def test_two_laps_of_one_life_give_the_same_to_the_last_bit(engine: TokenEngine) -> None:
    for seed in SEEDS[:6]:
        life = draw_life(Random(seed))
        first, second = (play(engine.recorder, life, overlap=True) for _ in range(2))
        assert values(first) == values(second) and first.stats == second.stats


def test_who_else_is_in_the_batch_and_in_which_row_changes_nothing(engine: TokenEngine) -> None:
    prompts = random_prompts(3, (5, 17, 1, 9))
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0, "seed": 4, "top_k": 20},
        {"temperature": 0.9, "repetition_penalty": 1.2},
    )
    for sampling in kinds:
        alone = [engine.session().run([prompt], 10, **sampling)[0] for prompt in prompts]
        for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3)):
            for stagger in (0, 2):
                found = engine.session(stagger=stagger).run([prompts[place] for place in order], 10, **sampling)
                check_same(found, [alone[place] for place in order], TOLERANCE)


def test_a_prompt_in_chunks_of_one_token_is_not_taken_for_decoding(engine: TokenEngine) -> None:
    check_one_token_chunks(engine.recorder, engine)


def check_one_token_chunks(recorder: RecordingWorker, whole: TokenEngine) -> None:
    """Run two prompts together, token by token, after another request ran in the same slots."""
    life = Life(Drive(prefix_cache=False), tuple(_plain_arrival(0, prompt) for prompt in random_prompts(5, (9, 6))), ())
    wanted = play(whole.recorder, life, overlap=False)
    for chunk in (1, 2):
        narrow = Life(Drive(chunk=chunk, prefix_cache=False), life.arrivals, ())
        for overlap in (False, True):
            check_same(play(recorder, narrow, overlap=overlap).results, wanted.results, TOLERANCE)


def test_a_long_prompt_is_scored_in_pieces_as_it_is_whole_and_other_targets_are_caught(
    engine: TokenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts(8, (23, 6))
    wanted = engine.session().run(prompts, 3, score_prompts=True)
    monkeypatch.setattr("sglcore.step.sampling_arrays.PROMPT_LOGITS_ELEMENTS", 4 * VOCAB)
    for chunk in (None, 7):
        check_same(engine.session(chunk=chunk).run(prompts, 3, score_prompts=True), wanted, TOLERANCE)
    score, first = Stepper._score, []

    def of_the_first(self: Stepper, hidden: Any, targets: Any, top_n: int) -> Any:
        first.append(targets)
        return score(self, hidden, first[0][: hidden.shape[0]], top_n)

    monkeypatch.setattr(Stepper, "_score", of_the_first)
    with pytest.raises(AssertionError):
        check_same(engine.session().run(prompts, 3, score_prompts=True), wanted, TOLERANCE)


def _plain_arrival(tick: int, prompt: Sequence[int], **sampling: Any) -> Arrival:
    values = {"temperature": 0.0, "logprobs": 0, "max_tokens": 6, **sampling}
    return Arrival(tick, tuple(prompt), SamplingParams(**values), 0, 0, frozenset())


class TakesOneTokenForDecode(Changed):
    """Treats a row with one token as its slot's last sampled token."""

    def change(self, batch: ScheduleBatch) -> None:
        counts = np.diff(batch.token_offsets)
        single = np.flatnonzero(counts == 1)
        batch.input_ids = batch.input_ids.copy()
        batch.input_ids[batch.token_offsets[single]] = -batch.slots[single]


class KeepsSamplingState(Changed):
    """Treats all batches as having the same composition."""

    def change(self, batch: ScheduleBatch) -> None:
        batch.composition = 1


class ForgetsHistory(Changed):
    """Drops the earlier tokens of a row that enters its slot."""

    def change(self, batch: ScheduleBatch) -> None:
        batch.history_ids = batch.history_offsets = None


class DropsNewPages(Changed):
    """Drops the pages that a request gets while it decodes."""

    def change(self, batch: ScheduleBatch) -> None:
        if batch.forward_mode.is_decode:
            batch.new_pages = batch.new_pages[:0]
            batch.new_page_offsets = batch.new_page_offsets * 0


def test_a_worker_that_takes_one_token_for_decoding_is_caught(folder: Path, engine: TokenEngine) -> None:
    with open_engine(folder) as broken, pytest.raises(AssertionError):
        check_one_token_chunks(RecordingWorker(TakesOneTokenForDecode(broken.worker)), engine)


DEFECTS = (
    TakesOneTokenForDecode,
    KeepsSamplingState,
    ForgetsHistory,
    DropsNewPages,
    KeepsOldPages,
    LosesSharedPages,
    NeighbouringPages,
    OneLengthForAll,
    OnePositionLate,
    RestartsChunks,
    SeedsByRow,
    SwapsRows,
)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught_by_some_life(defect: type[Changed], folder: Path, truth: Truth) -> None:
    for seed in SEEDS:
        life = draw_life(Random(seed))
        with open_engine(folder) as broken:
            try:
                check_life(life, play(RecordingWorker(defect(broken.worker)), life, overlap=False), truth)
            except Exception as error:
                print(f"caught by seed {seed}: {type(error).__name__}: {error}")
                return
    pytest.fail(f"no life of seeds {SEEDS} noticed")


NEVER_SPOILED = {"logit_bias": dict.fromkeys(SPOILED, -1e9), "temperature": 0.8}


def test_a_prompt_whose_numbers_are_none_ends_alone_and_leaves_no_trace(tmp_path: Path) -> None:
    """Token 1 of this checkpoint has a NaN embedding: its request ends with an error in any
    batch."""
    good = [_plain_arrival(tick, ids, **NEVER_SPOILED) for tick, ids in enumerate(random_prompts(6, (5, 11, 3, 8)))]
    bad = [_plain_arrival(tick, (7, SPOILED[1], 9), **NEVER_SPOILED) for tick in (0, 2, 3)]
    arrivals = (bad[0], good[0], good[1], bad[1], good[2], good[3], bad[2])
    with open_engine(write_tiny(tmp_path, spoiled=True)) as spoiled:
        truth = Truth(spoiled.recorder)
        for overlap in (False, True):
            for drive in (Drive(prefix_cache=True), Drive(prefix_cache=True, chunk=3, pages=CONTEXT // PAGE_SIZE)):
                lived = play(spoiled.recorder, Life(drive, arrivals, ()), overlap=overlap)
                ends = [result.finish for result in lived.results]
                assert ends == ["error", "length", "length", "error", "length", "length", "error"]
                fine = [result for result in lived.results if result.finish == "length"]
                check_same(fine, [truth(arrival) for arrival in good], TOLERANCE)


def test_padding_rows_of_compiled_steps_are_inert(tmp_path: Path) -> None:
    """Padding rows compute with NaN and write it to page 0; a batch of one to three rows is padded
    to four."""
    prompts = random_prompts(7, (5, 11, 3))
    with open_engine(write_tiny(tmp_path, spoiled=True)) as eager:
        wanted = [eager.session().run([prompt], 12, **NEVER_SPOILED)[0] for prompt in prompts]
    with open_engine(tmp_path, graph="compiled", graph_buckets=(4,)) as compiled:
        check_same(compiled.session(stagger=2).run(prompts, 12, **NEVER_SPOILED), wanted, TOLERANCE)
        assert {path for path in compiled.recorder.paths if path != "eager"}, "no step ran compiled"
