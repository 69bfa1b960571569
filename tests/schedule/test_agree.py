"""The agreement of shards on a step depends on no order, idle shard or timing; it is a pure
function, tested with random votes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from sglcore.schedule.data_parallel.dp_plan import StepVote, Terms, agree, reduced, vote_of
from sglcore.step.micro_batch_cut import CutTerms
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore.worker.step_plan import StepPlan
from tests.schedule.drive import Drive

CASES = 10_000
MODES = (ForwardMode.DECODE, ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED)
COUNTS = ("emitting", "verifying", "going_on")


@dataclass(frozen=True, slots=True)
class Known:
    """What holds for every step: the terms, and the captured sizes that all ranks have."""

    terms: Terms
    buckets: tuple[int, ...] = ()


Case = tuple[list[StepVote], Known, list[int]]


def planned(votes: list[StepVote], known: Known) -> StepPlan:
    """The agreed plan as ranks run it."""
    plan = agree(votes, known.terms)
    return plan.replayed(known.buckets) if plan.is_decode else plan


def drawn(seed: int, count: int) -> list[Case]:
    """Random votes of up to six shards, the terms that hold for every step, and an order of the
    shards."""
    rng = np.random.default_rng(seed)
    sizes, numbers = rng.integers(1, 7, count).tolist(), iter(rng.random((count, 6, 3)).tolist())
    terms = [Terms(width, equal) for width in (1, 2, 4) for equal in (False, True)]
    known = [Known(each, buckets) for each in terms for buckets in ((), (2, 4, 8, 16), (8,))]
    chosen = iter(rng.integers(len(known), size=count).tolist())
    order = rng.permuted(np.tile(np.arange(6), (count, 1)), axis=1).tolist()
    return [
        ([_vote(*each) for each in next(numbers)[:size]], known[next(chosen)], [i for i in turn if i < size])
        for size, turn in zip(sizes, order, strict=True)
    ]


def _vote(kind: float, size: float, other: float) -> StepVote:
    if kind < 0.2:
        return StepVote()
    mode = MODES[int(kind * 1.24 * len(MODES)) % len(MODES)]
    rows = int(size * (12 if mode is ForwardMode.DECODE else 40)) + 1
    cut = rows // 2 if other > 0.1 else 0
    given: dict[str, Any] = {
        "can_replay": other < 0.9,
        "is_extend": not mode.is_decode,
        "cuts": (cut,),
        "may_cut": cut > 0,
    }
    counts = (rows // 3,), (rows if mode.is_decode else 0,), (0 if mode.is_decode else int(other * 3),)
    return StepVote((rows,), mode, **given, **dict(zip(COUNTS, counts, strict=True)))


def order_is_nothing(agreed: Callable[..., StepPlan], case: Case) -> bool:
    votes, known, order = case
    plan, turned = agreed(votes, known), agreed([votes[place] for place in order], known)
    rows = tuple(plan.global_num_tokens[place] for place in order)
    cuts = None if plan.cuts is None else tuple(plan.cuts[place] for place in order)
    counts = {name: tuple(getattr(plan, name)[place] for place in order) for name in COUNTS}
    return turned == replace(plan, global_num_tokens=rows, cuts=cuts, **counts)


def idle_is_neutral(agreed: Callable[..., StepPlan], case: Case) -> bool:
    """An idle shard changes nothing but padding, which depends on the number of idle shards."""
    votes, known, order = case
    place = order[0]
    plan, more = agreed(votes, known), agreed([*votes[:place], StepVote(), *votes[place:]], known)
    rows = plan.global_num_tokens
    wanted = (*rows[:place], 0, *rows[place:])
    cuts = None if plan.cuts is None else (*plan.cuts[:place], 0, *plan.cuts[place:])
    counts = all(
        getattr(more, name) == (*getattr(plan, name)[:place], 0, *getattr(plan, name)[place:]) for name in COUNTS
    )
    return counts and (more.global_num_tokens, more.bucket, more.cuts) == (wanted, plan.bucket, cuts)


def all_are_cut_or_none(agreed: Callable[..., StepPlan], case: Case) -> bool:
    """Each busy shard has two micro-batches with rows, an idle one has two empty ones; together
    they have all its rows."""
    votes, known, _ = case
    plan = agreed(votes, known)
    busy = [vote for vote in votes if vote.rows != (0,)]
    if not busy or plan.bucket is not None or not all(vote.may_cut for vote in busy):
        return plan.cuts is None
    if plan.cuts is None:
        return False
    first, second = plan.halves()
    both = zip(first.global_num_tokens, second.global_num_tokens, votes, strict=True)
    return all(a + b == vote.rows[0] and ((a > 0 and b > 0) or vote.rows == (0,)) for a, b, vote in both)


def all_or_none(agreed: Callable[..., StepPlan], case: Case) -> bool:
    """A graph runs if all shards can replay, and its bucket holds the rows of each."""
    votes, known, _ = case
    plan = agreed(votes, known)
    busy = [vote for vote in votes if vote.rows != (0,)]
    if any(not vote.can_replay or vote.is_extend for vote in busy) or not busy:
        return plan.bucket is None
    most = max(plan.global_num_tokens)
    fitting = [size for size in known.buckets if most <= size]
    return plan.bucket == (fitting[0] if fitting else None) and (plan.bucket is None or plan.is_padded)


def each_shard_has_room(agreed: Callable[..., StepPlan], case: Case) -> bool:
    """What a shard contributes to an exchange holds its rows, in equal parts for its ranks."""
    votes, known, _ = case
    plan = agreed(votes, known)
    width, sizes = known.terms.width, plan.sizes(known.terms.width)
    return (
        plan.starts()[-1] == sum(vote.rows[0] for vote in votes)
        and all(size >= vote.rows[0] for size, vote in zip(sizes, votes, strict=True))
        and all(size % width == 0 for size in sizes)
        and (len(set(sizes)) == 1 or not plan.is_padded)
    )


LAWS = (order_is_nothing, idle_is_neutral, all_or_none, all_are_cut_or_none, each_shard_has_room)


@pytest.mark.parametrize("law", LAWS)
def test_every_plan_holds(law: Callable[..., bool]) -> None:
    bad = [case for case in drawn(1, CASES // len(LAWS)) if not law(planned, case)]
    assert not bad, bad[0]


def by_the_first(votes: list[StepVote], known: Known) -> StepPlan:
    """The first shard alone decides whether a graph runs."""
    plan = planned(votes, known)
    return replace(plan, bucket=planned(votes[:1], known).bucket)


def with_idle_votes(votes: list[StepVote], known: Known) -> StepPlan:
    """An idle shard cannot replay a graph."""
    given = [replace(vote, can_replay=vote.can_replay and vote.rows != (0,)) for vote in votes]
    return planned(given, known)


def cut_by_the_first(votes: list[StepVote], known: Known) -> StepPlan:
    """The first shard alone decides whether all are cut."""
    plan = planned(votes, known)
    return replace(plan, cuts=reduced(votes).cuts if votes[0].may_cut else None)


def idle_is_not_cut(votes: list[StepVote], known: Known) -> StepPlan:
    """An idle shard, which has nothing to cut, prevents the cut."""
    return planned([replace(vote, may_cut=vote.cuts != (0,)) for vote in votes], known)


@pytest.mark.parametrize("mutant", [by_the_first, with_idle_votes, cut_by_the_first, idle_is_not_cut])
def test_a_rule_that_looks_at_one_shard_is_caught(mutant: Callable[..., StepPlan]) -> None:
    assert any(not law(mutant, case) for case in drawn(2, 4000) for law in LAWS)


@pytest.mark.parametrize(
    ("rows", "is_extend", "is_padded"),
    [
        ((4, 4), False, True),
        ((1, 1, 1, 8), False, False),
        ((4, 0), False, True),
        ((5,), True, True),
        ((5, 5), True, False),
    ],
)
def test_rows_are_padded_where_that_moves_less(rows: tuple[int, ...], is_extend: bool, is_padded: bool) -> None:
    mode = ForwardMode.EXTEND if is_extend else ForwardMode.DECODE
    votes = [StepVote((count,), mode, is_extend=is_extend) if count else StepVote() for count in rows]
    assert agree(votes).is_padded is is_padded
    assert agree(votes, Terms(needs_equal_rows=True)).is_padded


def test_a_step_without_anybody_is_a_plan_too() -> None:
    nothing: dict[str, Any] = dict.fromkeys(COUNTS, (0, 0))
    assert agree([StepVote(), StepVote()], Terms(2)) == StepPlan((0, 0), is_padded=True, can_replay=True, **nothing)


def test_a_shard_votes_as_its_step_is() -> None:
    drive = Drive(overlap=False)
    drive.add("a", 3)
    prompt = drive.scheduler.next_batch()
    assert prompt is not None
    own = StepVote((3,), ForwardMode.EXTEND, can_replay=True, is_extend=True, may_cut=False, emitting=(1,))
    assert vote_of(prompt) == own
    assert (vote_of(prompt, CutTerms(2)).cuts, vote_of(prompt, CutTerms(2)).may_cut) == ((1,), True)
    assert (vote_of(prompt, CutTerms(4)).cuts, vote_of(prompt, CutTerms(4)).may_cut) == ((0,), False)
    prompt.embed_rows = np.zeros(1, np.int32)
    assert not vote_of(prompt).can_replay
    decode = _decode()
    assert (vote_of(decode).rows, vote_of(decode, width=4).rows) == ((2,), (8,))
    assert vote_of(decode, CutTerms(2), 4).cuts == (4,), "rows of one request stay together"
    assert (vote_of(decode).emitting, vote_of(decode).verifying, vote_of(decode).going_on) == ((2,), (2,), (0,))
    decode.mrope_positions = np.zeros((3, 2), np.int32)
    assert not vote_of(decode).can_replay, "graphs do not read inputs that only some batches have"
    decode.mrope_positions = None
    assert vote_of(decode).can_replay
    decode.return_hidden_states_before_norm.put(True)
    assert not vote_of(decode).can_replay, "no graph has the inputs of the last norm"
    assert vote_of(None) == StepVote((0,), ForwardMode.IDLE, can_replay=True, is_extend=False)


def _decode() -> ScheduleBatch:
    """A decode step of two requests."""
    drive = Drive(overlap=False)
    for name in "ab":
        drive.add(name, 3)
    drive.step()
    batch = drive.scheduler.next_batch()
    assert batch is not None and batch.forward_mode.is_decode
    return batch


def test_a_prompt_goes_on_where_it_has_pages_and_emits_where_it_ends() -> None:
    drive, found = Drive(overlap=False, max_batch_tokens=8), []
    drive.add("a", 20)
    for _ in range(3):
        batch = drive.scheduler.next_batch()
        assert batch is not None
        vote = vote_of(batch, width=4)
        found.append((vote.rows, vote.emitting, vote.going_on))
        ticket = drive.worker.submit(batch)
        drive.scheduler.finish(drive.scheduler.in_flight.newest, drive.worker.collect(ticket))
    assert found == [((8,), (0,), (0,)), ((8,), (0,), (1,)), ((4,), (1,), (1,))]


def test_the_other_forwards_of_a_step_have_rows_of_their_own() -> None:
    """Three shards: two requests that verify three draft tokens each, two prompts (one ends in this
    step), and an idle shard."""
    counts: dict[str, Any] = {"emitting": (2, 1, 0), "verifying": (2, 0, 0), "going_on": (0, 2, 0)}
    plan = StepPlan((8, 11, 0), bucket=8, cuts=(4, 5, 0), **counts).of_shard(1)
    forwards = plan.of_emitting(), plan.with_emitting(), plan.from_before(2), plan.before_prompts(2)
    assert [each and each.global_num_tokens for each in forwards] == [(2, 1, 0), (10, 12, 0), (12, 11, 0), (0, 4, 0)]
    assert all(each and (each.shard, each.bucket, each.cuts) == (1, None, None) for each in forwards)
    assert replace(plan, going_on=(0, 0, 0)).before_prompts(2) is None
