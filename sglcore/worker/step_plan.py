"""The plan of one step that all ranks follow. It is agreed before the step is submitted, and only
read afterwards.

`schedule/data_parallel/dp_plan.py` makes it. The offset of each shard's rows among all rows is
arithmetic over it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the data-parallel shards of requests agreed on for one step, by
    `schedule/data_parallel/dp_plan.py`.

    Every shard gets an equal plan except for `shard`. A step with speculation is several forwards,
    of the target and of the drafter, and every shard runs all of them.
    """

    global_num_tokens: tuple[int, ...]
    """Token rows of every shard, with those of draft tokens to verify; 0 of an idle one."""
    is_padded: bool = False
    """In exchanges between shards, each shard contributes the number of rows of the largest one.
    False: its own number of rows."""
    bucket: int | None = None
    """Every shard replays the graph of this many rows. None: no shard replays a graph."""
    shard: int = 0
    """The shard for which this plan is."""
    cuts: tuple[int, ...] | None = None
    """Rows of the first micro-batch of every shard, if ranks run this step as two micro-batches.
    None: one batch."""
    is_decode: bool = False
    """No shard has prompt rows. All shards choose the order of their micro-batches by it."""
    can_replay: bool = False
    """Graphs read all inputs that the rows of every shard have."""
    verified: int = 0
    """Draft tokens to verify for each request that decodes."""
    proposed: int = 0
    """Draft tokens to make for each request that samples."""
    emitting: tuple[int, ...] = ()
    """Number of requests that sample, by shard."""
    verifying: tuple[int, ...] = ()
    """Number of requests that decode, by shard."""
    going_on: tuple[int, ...] = ()
    """Number of prompts of each shard, counted only if at least one of them continues an earlier
    chunk; otherwise 0."""

    @classmethod
    def of_bucket(cls, rows: int, shards: int, shard: int) -> StepPlan:
        """Return the plan under which rank of `shard` captures the graph of a bucket: every one of
        the `shards` shards has `rows` rows, so the captured exchanges have fixed sizes.
        """
        return cls((rows,) * shards, is_padded=True, bucket=rows, shard=shard, is_decode=True)

    def of_shard(self, shard: int) -> StepPlan:
        """Return the same plan for another shard."""
        return replace(self, shard=shard)

    def of_rows(self, rows: tuple[int, ...]) -> StepPlan:
        """Return the plan of another forward of the same step, with `rows[i]` rows of shard i. That
        forward replays no graph and is not split into micro-batches.
        """
        return replace(self, global_num_tokens=rows, bucket=None, cuts=None)

    def replayed(self, sizes: Sequence[int]) -> StepPlan:
        """Return the plan of this forward with the smallest of the captured `sizes`, ascending,
        that holds the rows of every shard; the same plan if there is no such size, or graphs do not
        read all inputs. Each shard must have decode rows or none. A step that is replayed is not
        split into micro-batches.
        """
        bucket = bucket_for(max(self.global_num_tokens, default=0), sizes) if self.can_replay else None
        return self if bucket is None else replace(self, bucket=bucket, is_padded=True, cuts=None)

    def of_emitting(self) -> StepPlan:
        """Return the plan of a forward with one row for each request that samples (`emitting`)."""
        return self.of_rows(self.emitting)

    def with_emitting(self) -> StepPlan:
        """Return the plan of a forward with all rows, and one more for each request that samples
        (`emitting`).
        """
        return self.of_rows(tuple(map(sum, zip(self.global_num_tokens, self.emitting, strict=True))))

    def from_before(self, back: int) -> StepPlan:
        """Return the plan of a forward with all rows, and `back` more for each request that
        decodes.
        """
        both = zip(self.global_num_tokens, self.verifying, strict=True)
        return self.of_rows(tuple(rows + count * back for rows, count in both))

    def before_prompts(self, back: int) -> StepPlan | None:
        """Return the plan of a forward with `back` rows before each continued prompt; None if no
        shard continues one.
        """
        return self.of_rows(tuple(count * back for count in self.going_on)) if any(self.going_on) else None

    def halves(self) -> tuple[StepPlan, StepPlan]:
        """Return the plans of both micro-batches, which are not split further. Raises ValueError
        for a step without cuts.
        """
        if self.cuts is None:
            raise ValueError("found a step that a shard cannot split into two micro-batches; wanted a step with cuts")
        rest = tuple(count - cut for count, cut in zip(self.global_num_tokens, self.cuts, strict=True))
        first, second = (replace(self, global_num_tokens=rows, cuts=None) for rows in (self.cuts, rest))
        return first, second

    def copy_for_forward(self) -> StepPlan:
        """Return the plan itself: it is immutable."""
        return self

    def starts(self) -> tuple[int, ...]:
        """Return the first row of each shard among all rows, without padding, and then the number
        of all rows: one entry more than there are shards.
        """
        return (0, *accumulate(self.global_num_tokens))

    def sizes(self, width: int) -> tuple[int, ...]:
        """Return the number of rows that each shard contributes to an exchange, rounded up to a
        multiple of the `width` ranks that share them. If `is_padded`, each shard contributes the
        largest number.
        """
        rounded = tuple(-(-count // width) * width for count in self.global_num_tokens)
        return (max(rounded),) * len(rounded) if self.is_padded else rounded


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of `sizes`, ascending, that holds `rows`; None if there is none, or if
    `rows` is 0.
    """
    place = bisect_left(sizes, rows)
    return sizes[place] if rows and place < len(sizes) else None
