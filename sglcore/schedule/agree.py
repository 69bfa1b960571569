"""Every decision that several shards of requests must make alike, as one pure function of what each of them has.

A decision that a rank made for itself, from what it alone sees, would send it into another collective than the others. So a
shard votes, the votes are reduced by name, and all of them run the plan that comes out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

import numpy as np

from sglcore.device.batch import ForwardMode, ScheduleBatch
from sglcore.device.cut import CutTerms
from sglcore.device.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Reducer:
    """What becomes of two votes of one name; `neutral` is the vote of who has nothing to say, and changes none."""

    join: Callable[[Any, Any], Any]
    neutral: Any


def _same_or_mixed(first: ForwardMode, second: ForwardMode) -> ForwardMode:
    if ForwardMode.IDLE in (first, second):
        return max(first, second)
    return first if first is second else ForwardMode.MIXED


EACH = Reducer(lambda first, second: first + second, ())
ALL = Reducer(lambda first, second: first and second, True)
ANY = Reducer(lambda first, second: first or second, False)
SAME = Reducer(_same_or_mixed, ForwardMode.IDLE)


def _vote(reducer: Reducer, neutral: Any = None) -> Any:
    return field(default=reducer.neutral if neutral is None else neutral, metadata={"reducer": reducer})


@dataclass(frozen=True, slots=True)
class StepVote:
    """What one shard of requests has for a step; without arguments the vote of an idle shard.

    Each field is reduced over all shards. A new decision is one more field.
    """

    rows: tuple[int, ...] = _vote(EACH, (0,))
    """Token rows, one entry for each shard."""
    mode: ForwardMode = _vote(SAME)
    """What the forward does. MIXED where shards differ."""
    can_replay: bool = _vote(ALL)
    """It has no input that graphs do not read."""
    is_extend: bool = _vote(ANY)
    """It has rows of prompts."""
    cuts: tuple[int, ...] = _vote(EACH, (0,))
    """Rows of the first half where ranks run the step as two halves; 0: it has no two halves. One
    entry for each shard."""
    may_cut: bool = _vote(ALL)
    """It can be cut in two halves."""
    emitting: tuple[int, ...] = _vote(EACH, (0,))
    """Requests that sample, one entry for each shard."""
    verifying: tuple[int, ...] = _vote(EACH, (0,))
    """Requests that decode, one entry for each shard."""
    going_on: tuple[int, ...] = _vote(EACH, (0,))
    """Prompts of a step in which some continue earlier chunks, one entry for each shard."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is so at every step: `width` ranks share the rows of a shard, `buckets` are the captured sizes, ascending.
    `needs_equal_rows`: what carries rows between ranks takes equally many of each."""

    width: int = 1
    buckets: tuple[int, ...] = ()
    needs_equal_rows: bool = False


@dataclass(frozen=True, slots=True)
class Proposals:
    """How many of each request are `verified` in a step, and `proposed` for the next: said by who sees all shards, and no vote."""

    verified: int = 0
    proposed: int = 0


def vote_of(batch: ScheduleBatch | None, cut: CutTerms | None = None, width: int = 1) -> StepVote:
    """The vote of a shard with this step, None for one that has nothing to run. `cut`: which steps it would run as two halves;
    a decode runs `width` rows of each request."""
    if batch is None:
        return StepVote()
    mode, where = batch.forward_mode, 0
    if cut is not None and mode.is_decode:
        where = cut.of_decode(batch.batch_size, width)
    elif cut is not None:
        where = cut.of_prompts(np.diff(batch.token_offsets))
    return StepVote(
        (batch.num_tokens * (width if mode.is_decode else 1),),
        mode,
        can_replay=batch.embed_rows is None,
        is_extend=not mode.is_decode,
        cuts=(where,),
        may_cut=where > 0,
        emitting=(int(np.count_nonzero(batch.emits)),),
        verifying=(batch.batch_size if mode.is_decode else 0,),
        going_on=(batch.batch_size if not mode.is_decode and batch.page_counts.any() else 0,),
    )


def reduced(votes: Sequence[StepVote]) -> StepVote:
    """All votes as one, each name by its reducer; `rows` in the order of the shards."""
    found = {}
    for item in fields(StepVote):
        reducer: Reducer = item.metadata["reducer"]
        found[item.name] = reduce(reducer.join, (getattr(vote, item.name) for vote in votes), reducer.neutral)
    return StepVote(**found)


def agree(votes: Sequence[StepVote], terms: Terms = Terms(), proposals: Proposals = Proposals()) -> StepPlan:
    """The plan that every shard runs, whatever they voted. Idle shards decide nothing: they follow.

    All replay, in the smallest bucket that holds the largest shard and is not more than twice its rows, or nobody does. Rows
    are padded where the transport or a graph needs it; else where gathering the largest moves no more than summing all, which
    steps with prompts, whose sizes differ most, never try. All have two halves, idle ones two empty ones, or nobody has."""
    total = reduced(votes)
    shards, rounded = len(total.rows), [-(-count // terms.width) * terms.width for count in total.rows]
    largest = max(rounded, default=0)
    may_replay = total.can_replay and total.mode.is_decode
    bucket = _bucket(largest, terms.buckets) if may_replay else None
    if terms.needs_equal_rows or bucket is not None:
        is_padded = True
    elif total.is_extend and shards > 1:
        is_padded = False
    else:
        is_padded = 2 * sum(rounded) >= shards * largest
    cuts = total.cuts if total.may_cut and any(total.cuts) and bucket is None else None
    return StepPlan(
        total.rows,
        is_padded,
        bucket,
        cuts=cuts,
        is_decode=total.mode.is_decode,
        verified=proposals.verified,
        proposed=proposals.proposed,
        emitting=total.emitting,
        verifying=total.verifying,
        going_on=total.going_on,
    )


def _bucket(rows: int, buckets: tuple[int, ...]) -> int | None:
    """The smallest that holds so many, if it does not waste more than it runs."""
    place = bisect_left(buckets, rows)
    fits = rows and place < len(buckets) and buckets[place] <= 2 * rows
    return buckets[place] if fits else None
