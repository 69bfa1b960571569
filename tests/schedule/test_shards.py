"""Shards with their own schedulers: all take part in each step, with one plan, and each request's
output equals that of the request alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from sglcore.schedule.data_parallel.dp_loop import Sent, ShardLoop
from sglcore.schedule.data_parallel.dp_ranks import SLACK, Shards, choose_shard
from sglcore.schedule.make_loop import make_scheduler
from sglcore.schedule.request import Request, State
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput
from sglcore.step.draft_length import LengthController
from sglcore.worker.model_worker import BatchResult, Limits, Ticket
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore.worker.step_plan import StepPlan
from tests.schedule.fake_speculation import FakeSpeculativeWorker
from tests.schedule.fake_worker import FakeMatcher, FakeWorker, Truth, Violation, compose, make_limits, make_params


class AsPlanned(FakeSpeculativeWorker):
    """Verifies the number of draft tokens in the step's plan."""

    def _run(self, batch: ScheduleBatch) -> BatchResult:
        assert batch.step_plan is not None
        self.width = batch.step_plan.verified + 1
        return super()._run(batch)

    def _width(self, step: int) -> int:
        return self.width


class Ranks:
    """A checking worker for each shard. A step of one runs once the steps of all others have
    arrived, as on ranks that wait for each other, and only if all have the same plan with each
    shard's true number of rows."""

    def __init__(self, limits: Limits, count: int) -> None:
        self.limits = limits
        self.truth = Truth(limits.vocab_size)
        kind = AsPlanned if limits.draft_tokens else FakeWorker
        self.workers = [kind(limits, self.truth) for _ in range(count)]
        self.submitted = [0] * count
        self.plans: list[dict[int, StepPlan]] = []
        self.collected = [0] * count
        self.idle = 0
        self.fails_at: int | None = None
        self.fails_to_collect: int | None = None

    def submit(self, batch: ScheduleBatch) -> Ticket:
        plan = batch.step_plan
        assert plan is not None
        step = self.submitted[plan.shard]
        if step == self.fails_at:
            self.fails_at = None
            raise RuntimeError("this step is too much")
        self.submitted[plan.shard] += 1
        if step == len(self.plans):
            self.plans.append({})
        self.plans[step][plan.shard] = plan
        is_decode = batch.forward_mode.is_decode
        found = tuple(by_shard[plan.shard] for by_shard in (plan.global_num_tokens, plan.emitting, plan.verifying))
        wanted = batch.num_tokens * (plan.verified + 1 if is_decode else 1), int(batch.emits.sum())
        if found != (*wanted, batch.batch_size if is_decode else 0):
            raise Violation(f"shard {plan.shard} brings {batch.num_tokens} rows, and agreed on {plan}")
        goes_on = batch.batch_size if not is_decode and batch.page_counts.any() else 0
        if plan.going_on[plan.shard] != goes_on:
            raise Violation(f"shard {plan.shard} has {goes_on} prompts of which some go on, and agreed on {plan}")
        if batch.forward_mode is ForwardMode.IDLE:
            self.idle += 1
            return Ticket(batch.step, plan.shard)
        ticket = self.workers[plan.shard].submit(batch)
        return Ticket(batch.step, (plan.shard, ticket))

    def collect(self, ticket: Ticket) -> BatchResult:
        payload: Any = ticket.payload
        shard, inner = payload if isinstance(payload, tuple) else (payload, None)
        plans = self.plans[self.collected[shard]]
        self.collected[shard] += 1
        if shard == self.fails_to_collect:
            self.fails_to_collect = None
            raise RuntimeError("this result is lost")
        if len({plan.of_shard(0) for plan in plans.values()}) != 1 or len(plans) != len(self.workers):
            raise Violation(f"shard {shard} waits for others for ever: {plans}")
        if inner is None:
            none = np.zeros(0, np.int32)
            return BatchResult(ticket.step, np.zeros(1, np.int32), none, none.astype(np.bool_))
        return self.workers[shard].collect(inner)

    def close(self) -> None:
        pass


class Drive:
    """Shards on ranks; every step is audited."""

    def __init__(self, count: int = 3, loop: type[ShardLoop] = ShardLoop, overlap: bool = True, **limits: Any) -> None:
        self.limits = make_limits(**limits)
        self.worker = Ranks(self.limits, count)
        self.shards = Shards(self.limits, count, make=partial(make_scheduler, compose=compose))
        self.loop = loop(self.shards, self.worker, overlap=overlap)
        self.outputs: list[EngineOutput] = []

    def make(self, rid: str, prompt: Sequence[int], most: int = 8, **given: Any) -> Request:
        return Request(rid, np.array(prompt, dtype=np.int32), make_params(most), **given)

    def add(self, rid: str, prompt: Sequence[int], most: int = 8, **given: Any) -> Request:
        request = self.make(rid, prompt, most, **given)
        self.shards.add(request)
        return request

    def step(self) -> None:
        self.outputs += self.loop.step()
        self.shards.audit()

    def run(self) -> None:
        for _ in range(500):
            if not self.loop.has_work:
                return
            self.step()
        raise AssertionError(f"still working: {self.shards.stats()}")

    def alone(self, request: Request) -> list[int]:
        return self.worker.truth.output(request, self.limits.max_model_len)[0]

    def holder(self, rid: str) -> int:
        """The index of the shard that holds an unfinished request."""
        return next(place for place, each in enumerate(self.shards.each) if rid in each.requests)


PROPOSING: MappingProxyType[str, Any] = MappingProxyType(
    {"draft_tokens": 4, "allows_mixed_batches": False, "keeps_history": True, "num_pages": 64}
)


class AtRandom(LengthController):
    """Chooses a random length before each step."""

    def __init__(self, rng: Random) -> None:
        super().__init__((0, 1, 3, 4))
        self.rng, self.taken = rng, Counter[int]()

    def choose(self, requests: int) -> None:
        self.tokens = self.rng.choice(self.lengths)
        self.taken[self.tokens] += 1


def play(rng: Random, loop: type[ShardLoop] = ShardLoop, **limits: Any) -> Drive:
    """Play a random trace: arrivals of prompts with common prefixes, and aborts; check that each
    request ends with the output of the request alone."""
    drive = Drive(rng.randint(1, 4), loop, rng.random() < 0.7, max_batch_tokens=rng.choice([8, 16]), **limits)
    if limits:
        drive.loop._length._length = AtRandom(Random(rng.random()))
    stems = [[rng.randrange(50) for _ in range(12)] for _ in range(3)]
    requests, aborted = [], set()
    for tick in range(40):
        if rng.random() < 0.3:
            prompt = rng.choice(stems)[: rng.randint(1, 12)] + [rng.randrange(50) for _ in range(rng.randint(1, 9))]
            requests.append(drive.add(f"r{tick}", prompt, rng.randint(1, 12)))
        alive = [request for request in requests if request.state is not State.FINISHED]
        if alive and rng.random() < 0.05:
            aborted.add((gone := rng.choice(alive)).rid)
            assert drive.shards.abort(gone.rid) is not None
        if drive.loop.has_work:
            drive.step()
    drive.run()
    for request in requests:
        whole = drive.alone(request)
        assert request.output_ids == (whole[: len(request.output_ids)] if request.rid in aborted else whole)
    stats = drive.shards.stats()
    assert stats.waiting == stats.running == stats.in_flight == 0
    assert drive.worker.collected == drive.worker.submitted, "a step is left open"
    return drive


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_as_if_it_had_run_alone(seed: int) -> None:
    print("seed", seed)
    play(Random(seed))


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(30))
def test_the_same_where_tokens_are_proposed(seed: int, lookahead: int) -> None:
    print("seed", seed)
    play(Random(seed), lookahead=lookahead, **PROPOSING)


def test_the_traces_reach_what_they_are_meant_to_reach() -> None:
    seen = [play(Random(seed)) for seed in range(20)]
    assert sum(drive.worker.idle for drive in seen) > 20
    assert sum(drive.shards.stats().hit_tokens for drive in seen) > 100
    proposing = [play(Random(seed), **PROPOSING) for seed in range(10)]
    lengths = [drive.loop._length._length for drive in proposing]
    assert all(
        sum(each.taken[tokens] for each in lengths if isinstance(each, AtRandom)) > 20 for tokens in (0, 1, 3, 4)
    )
    plans = [plan.of_shard(0) for drive in proposing for step in drive.worker.plans for plan in step.values()]
    assert any(plan.verified != plan.proposed for plan in plans)
    assert any(any(plan.verifying) and not plan.is_decode for plan in plans), "no prompts beside decodes"
    assert any(any(plan.going_on) and any(plan.verifying) for plan in plans)
    assert sum(drive.worker.idle for drive in proposing) > 20
    padded = [plan.is_padded for drive in seen for step in drive.worker.plans for plan in step.values()]
    assert {True, False} <= set(padded)


class LeavesIdleOnesOut(ShardLoop):
    """An idle shard submits nothing."""

    def _send(self, number: int, plan: StepPlan, batch: ScheduleBatch | None) -> Sent:
        if batch is None:
            return Sent(number, self.scheduler.each[plan.shard], None)
        return super()._send(number, plan, batch)


class DecidesForItself(ShardLoop):
    """A shard pads by its own rows."""

    def _send(self, number: int, plan: StepPlan, batch: ScheduleBatch | None) -> Sent:
        own = batch is not None and batch.forward_mode.is_decode
        return super()._send(number, replace(plan, is_padded=own), batch)


class ForgetsTheOrder(ShardLoop):
    """Reports the rows of the shards in reverse order."""

    def _send(self, number: int, plan: StepPlan, batch: ScheduleBatch | None) -> Sent:
        return super()._send(number, replace(plan, global_num_tokens=plan.global_num_tokens[::-1]), batch)


class CountsRequests(ShardLoop):
    """Counts one row per request in a verification."""

    def _send(self, number: int, plan: StepPlan, batch: ScheduleBatch | None) -> Sent:
        rows = tuple(many or rows for many, rows in zip(plan.verifying, plan.global_num_tokens, strict=True))
        return super()._send(number, replace(plan, global_num_tokens=rows), batch)


class OwnLengths(ShardLoop):
    """Each shard chooses the number of draft tokens to verify."""

    def _send(self, number: int, plan: StepPlan, batch: ScheduleBatch | None) -> Sent:
        return super()._send(number, replace(plan, verified=(number + plan.shard) % 4), batch)


class OwnNumbers(ShardLoop):
    """Each shard chooses the number of draft tokens to propose."""

    def _send(self, number: int, plan: StepPlan, batch: ScheduleBatch | None) -> Sent:
        return super()._send(number, replace(plan, proposed=(number + plan.shard) % 4), batch)


@pytest.mark.parametrize(
    ("mutant", "limits"),
    [
        *((mutant, {}) for mutant in (LeavesIdleOnesOut, DecidesForItself, ForgetsTheOrder)),
        *((mutant, PROPOSING) for mutant in (LeavesIdleOnesOut, CountsRequests, OwnLengths, OwnNumbers)),
    ],
)
def test_a_loop_that_breaks_step_is_caught(mutant: type[ShardLoop], limits: dict[str, Any]) -> None:
    def is_caught(seed: int) -> bool:
        try:
            play(Random(seed), mutant, **limits)
        except (Violation, AssertionError, IndexError):
            return True
        return False

    assert any(is_caught(seed) for seed in range(10))


def test_a_prompt_goes_where_its_beginning_is() -> None:
    drive, stem = Drive(2), list(range(1, 17))
    drive.add("first", stem)
    place = drive.holder("first")
    drive.add("other", [40, 41])
    assert drive.holder("other") != place
    drive.run()
    again = drive.add("again", [*stem, 30])
    assert drive.holder("again") == place
    drive.run()
    assert again.cached_tokens == 16


def test_samples_of_one_prompt_stay_together() -> None:
    drive = Drive(3)
    leader = drive.add("a/0", [1, 2, 3])
    followers = [drive.make(f"a/{n}", [1, 2, 3], sample_index=n, leader=leader) for n in (1, 2)]
    for each in followers:
        drive.shards.add(each)
    assert {drive.holder(f"a/{n}") for n in range(3)} == {drive.holder("a/0")}


@pytest.mark.parametrize(
    ("hits", "loads", "chosen"),
    [([0, 0], [0, 0], 0), ([0, 0], [2, 1], 1), ([0, 5], [0, 2], 1), ([0, 5], [0, 3], 0), ([1, 5, 5], [0, 2, 1], 2)],
)
def test_a_full_shard_keeps_no_prompt_to_itself(hits: list[int], loads: list[int], chosen: int) -> None:
    assert choose_shard(hits, loads, room=2) == chosen


def test_one_name_is_used_once_over_all_shards() -> None:
    drive = Drive(2)
    drive.add("a", [1, 2])
    with pytest.raises(RequestError, match="'a' was added before"):
        drive.add("a", [3, 4])
    drive.run()
    drive.add("a", [3, 4])
    assert drive.shards.abort("nobody") is None and drive.shards.stop("nobody", "x") is None


def test_a_step_that_fails_ends_its_requests_in_every_shard_and_the_loop_goes_on() -> None:
    drive = Drive(2, overlap=False)
    failed = [drive.add("a", [1, 2]), drive.add("b", [3, 4])]
    drive.worker.fails_at = 0
    with pytest.raises(RuntimeError, match="too much"):
        drive.step()
    assert drive.loop.has_work
    assert {(each.request_id, each.finish_reason) for each in drive.loop.drain()} == {("a", "error"), ("b", "error")}
    assert all(request.finish_reason == "error" for request in failed) and not drive.loop.has_work
    drive.shards.audit()


def test_what_other_shards_gave_is_kept_where_a_result_is_lost() -> None:
    drive = Drive(2, overlap=False)
    spared, lost = drive.add("a", [1, 2], 1), drive.add("b", [3, 4])
    drive.worker.fails_to_collect = 1
    with pytest.raises(RuntimeError, match="lost"):
        drive.step()
    assert [(each.request_id, each.finish_reason) for each in drive.loop.drain()] == [("a", "length"), ("b", "error")]
    assert spared.output_ids == drive.alone(spared) and lost.finish_reason == "error"
    later = drive.add("c", [5, 6])
    drive.run()
    assert later.output_ids == drive.alone(later)


@pytest.mark.parametrize(("asked", "can"), [(True, True), (False, True), (True, False)])
def test_a_step_of_every_shard_is_in_flight_at_most_if_asked_and_possible(asked: bool, can: bool) -> None:
    drive = Drive(2, overlap=asked, can_overlap=can)
    requests = [drive.add("a", [1, 2]), drive.add("b", [3, 4])]
    drive.step()
    assert drive.shards.stats().in_flight == (1 if asked and can else 0)
    drive.run()
    assert [request.output_ids for request in requests] == [drive.alone(request) for request in requests]


def test_a_grammar_of_one_shard_has_its_tokens_before_any_shard_plans() -> None:
    """So each step of the loop is a step of every shard, and no shard idles while another plans."""
    drive = Drive(2)
    free, bound = drive.add("free", [1, 2], 6), drive.make("bound", [3, 4], 6)
    bound.matcher = FakeMatcher(bound, None)
    drive.shards.add(bound)
    assert drive.holder("free") != drive.holder("bound")
    drive.run()
    assert drive.worker.idle == 0
    for request in (free, bound):
        assert len(request.output_ids) == 6 and request.output_ids == drive.alone(request)


def test_counts_of_all_shards_are_added_but_for_what_is_so_of_all_at_once() -> None:
    sizes: dict[str, Any] = {
        f"{name}_bytes": 10 + place for place, name in enumerate(("kv", "window", "state", "snapshot", "host"))
    }
    drive = Drive(3, **sizes)
    for place in range(2):
        drive.add(f"r{place}", [place + 1, place + 2])
    drive.step()
    stats = drive.shards.stats()
    assert {name: getattr(stats, name) for name in sizes} == sizes, "each device has so many"
    assert (stats.num_pages, stats.running, stats.in_flight, stats.steps) == (3 * 32, 2, 1, 1)
    for place, scheduler in enumerate(drive.shards.each):
        scheduler.drafts[2, 1, 0, 0] += 10**place
    assert drive.shards.drafts == {(2, 1, 0, 0): 111}


def test_the_prefixes_of_every_shard_are_forgotten() -> None:
    drive = Drive(2)
    for place in range(2):
        drive.add(f"r{place}", [10 * place + token for token in range(9)])
    drive.run()
    held = [scheduler.stats().cached_pages for scheduler in drive.shards.each]
    assert all(held) and drive.shards.flush_prefix_cache() == sum(held)
    assert drive.shards.stats().cached_pages == 0


def test_names_of_the_ended_are_forgotten_and_of_nobody_else() -> None:
    drive = Drive(2)
    for place in range(SLACK):
        drive.add(f"ended{place}", [1], 1)
        drive.run()
    waiting = [drive.add(f"waits{place}", [2, 3]) for place in range(12)]  # more than can run
    drive.step()
    more = [drive.add(f"more{place}", [4, 5]) for place in range(2)]
    assert len(drive.shards._placed) < SLACK
    for request in (*waiting, *more):
        assert drive.shards.abort(request.rid) is not None and request.state is State.FINISHED
