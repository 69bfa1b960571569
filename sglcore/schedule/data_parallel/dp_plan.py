"""Compute the plan that all shards (DP ranks) run, as one pure function of their votes.

A rank must not decide from its own state alone, or it enters a different collective than the
others. So each shard votes, the votes are reduced field by field, and all shards run the resulting
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from typing import Any

import numpy as np

from sglcore.step.forward_inputs import ForwardInputs
from sglcore.step.host_values import optional_inputs
from sglcore.step.micro_batch_cut import CutTerms
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore.worker.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Reducer:
    """How the votes of all shards for one field become one value: `join` combines two of them.
    `neutral` is the vote of an idle shard; it changes no result.
    """

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
    """The vote of one shard (DP rank) for a step. The default values are the vote of an idle shard.

    Each field is reduced over all shards. A new decision is one more field.
    """

    rows: tuple[int, ...] = _vote(EACH, (0,))
    """Number of token rows, one entry for each shard."""
    mode: ForwardMode = _vote(SAME)
    """The forward mode. MIXED if shards with rows differ."""
    can_replay: bool = _vote(ALL)
    """Graphs read all inputs of the step."""
    is_extend: bool = _vote(ANY)
    """The step is not a decode."""
    cuts: tuple[int, ...] = _vote(EACH, (0,))
    """Number of rows in the first of two micro-batches, one entry for each shard. 0: the shard
    would run the step whole."""
    may_cut: bool = _vote(ALL)
    """The step can be split in two micro-batches."""
    emitting: tuple[int, ...] = _vote(EACH, (0,))
    """Number of requests that sample, one entry for each shard."""
    verifying: tuple[int, ...] = _vote(EACH, (0,))
    """Number of requests that decode, one entry for each shard."""
    going_on: tuple[int, ...] = _vote(EACH, (0,))
    """Number of requests of a prefill step in which some continue earlier chunks, one entry for
    each shard. 0: no request continues."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What `agree` must know about workers and their ranks, the same for all steps.

    `width` ranks share the token rows of a shard. `needs_equal_rows`: the transport between ranks
    needs the same number of rows from each shard.
    """

    width: int = 1
    needs_equal_rows: bool = False


@dataclass(frozen=True, slots=True)
class Proposals:
    """Number of draft tokens of each request: `verified` in this step, and `proposed` for the next
    one. The caller sees all shards and chooses both, so they are not voted on.
    """

    verified: int = 0
    proposed: int = 0


_has_optional_inputs = optional_inputs(ForwardInputs)


def vote_of(batch: ScheduleBatch | None, cut: CutTerms | None = None, width: int = 1) -> StepVote:
    """Return the vote of a shard for a step; `batch` None is an idle shard. `cut` says which steps
    the shard would run as two micro-batches. A decode step runs `width` rows of each request.
    """
    if batch is None:
        return StepVote()
    mode, where = batch.forward_mode, 0
    # No graph has the inputs of the last norm.
    has_before = batch.return_hidden_states_before_norm.is_set
    if cut is not None and mode.is_decode:
        where = cut.of_decode(batch.batch_size, width)
    elif cut is not None:
        where = cut.of_prompts(np.diff(batch.token_offsets))
    return StepVote(
        (batch.num_tokens * (width if mode.is_decode else 1),),
        mode,
        can_replay=batch.embed_rows is None and not _has_optional_inputs(batch) and not has_before,
        is_extend=not mode.is_decode,
        cuts=(where,),
        may_cut=where > 0,
        emitting=(int(np.count_nonzero(batch.emits)),),
        verifying=(batch.batch_size if mode.is_decode else 0,),
        going_on=(batch.batch_size if not mode.is_decode and batch.page_counts.any() else 0,),
    )


def reduced(votes: Sequence[StepVote]) -> StepVote:
    """Combine all votes into one, each field with its reducer. `rows` keeps the order of the
    shards.
    """
    found = {}
    for item in fields(StepVote):
        reducer: Reducer = item.metadata["reducer"]
        found[item.name] = reduce(reducer.join, (getattr(vote, item.name) for vote in votes), reducer.neutral)
    return StepVote(**found)


def agree(votes: Sequence[StepVote], terms: Terms = Terms(), proposals: Proposals = Proposals()) -> StepPlan:
    """Return the plan that every shard runs. Idle shards have no influence; they follow.

    All shards replay a graph or none does: the plan says whether the step can, and the ranks, which
    know the captured sizes, derive the same one from it (`StepPlan.replayed`). Rows are padded if
    the transport needs it. Decode steps are also padded if gathering padded rows moves no more data
    than summing all rows; steps with prompts never are, because their sizes differ most. All shards
    run two micro-batches or none does; an idle shard runs two empty ones.
    """
    total = reduced(votes)
    shards, rounded = len(total.rows), [-(-count // terms.width) * terms.width for count in total.rows]
    largest = max(rounded, default=0)
    if terms.needs_equal_rows:
        is_padded = True
    elif total.is_extend and shards > 1:
        is_padded = False
    else:
        is_padded = 2 * sum(rounded) >= shards * largest
    cuts = total.cuts if total.may_cut and any(total.cuts) else None
    return StepPlan(
        total.rows,
        is_padded,
        cuts=cuts,
        is_decode=total.mode.is_decode,
        can_replay=total.can_replay,
        verified=proposals.verified,
        proposed=proposals.proposed,
        emitting=total.emitting,
        verifying=total.verifying,
        going_on=total.going_on,
    )
