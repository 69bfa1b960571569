"""Policy of decode graphs: a bucket is a batch size.

The plan of a bucket is refreshed in place before each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from sglcore.runtime.attention.contract import AttentionBackend, AttentionPlan, Bucket, HostUpdate
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.graphs.graph_backend import CapturedStep, Forward, GraphBackend
from sglcore.runtime.graphs.graph_policy import (
    SizedGraphs,
    carry_host_arrays,
    check_generation,
    generation,
    read_host_arrays,
)
from sglcore.runtime.split_forward import CapturedSplit, SplitForward
from sglcore.worker.schedule_batch import ForwardMode
from sglcore.worker.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class CapturedBucket:
    """A graph with everything that it reads.

    These are the static batch view and the `plan`, or with plan None two micro-batches with their
    plans (`halves`). `generation` has the generations of the pools at capture.
    """

    batch: ForwardBatch
    plan: AttentionPlan | None
    halves: CapturedSplit | None
    generation: tuple[int, int]
    step: CapturedStep


PlanOfBucket = Callable[[int], StepPlan | None]
"""Returns the plan under which a graph of so many rows is captured; None with one shard."""


def one_shard(rows: int) -> None:
    """Implements `PlanOfBucket` for requests in one shard."""


class DecodeGraphs(SizedGraphs[CapturedBucket]):
    """Captures and replays decode steps, padded to the next captured batch size. With data-parallel
    shards the step's plan says which size all of them replay, also a shard without rows.
    """

    def __init__(
        self,
        backend: GraphBackend,
        registry: BufferRegistry,
        context: ForwardContext,
        forward: Forward,
        buckets: tuple[int, ...],
        needs_host_lengths: bool = False,
        halves: SplitForward | None = None,
        plan_of: PlanOfBucket = one_shard,
    ) -> None:
        """`needs_host_lengths`: a replay needs lengths on the host. `halves` says which sizes are
        captured as two interleaved micro-batches (None: no size). `plan_of`: the plan of each size.
        """
        super().__init__(registry, context, forward, buckets, registry.max_bs)
        self.backend = backend
        self._needs_host_lengths, self._halves, self._plan_of = needs_host_lengths, halves, plan_of
        self._nothing = self._without_rows()

    @property
    def in_halves(self) -> tuple[int, ...]:
        """The captured sizes with graphs of two micro-batches."""
        return tuple(size for size in self.sizes if self._captured[size].halves is not None)

    def _fits(self, batch: ForwardBatch) -> bool:
        """Return whether there is a bucket for the batch, and its lengths on the host if needed."""
        has_lengths = batch.seq_lens_cpu is not None or not self._needs_host_lengths
        return has_lengths and self._bucket_of(batch) in self._captured

    def _unread(self, batch: ForwardBatch) -> tuple[str, ...]:
        return super()._unread(batch) if batch.num_tokens else ()

    def _bucket_of(self, batch: ForwardBatch) -> int | None:
        """Return the size that the batch's shards agreed on, if they are several, else the smallest
        one that holds its rows; None if there is none.
        """
        plan = batch.step_plan
        if plan is None:
            return self.bucket_for(batch.batch_size)
        return None if plan.bucket is None or plan.bucket < batch.batch_size else plan.bucket

    def path(self, batch: ForwardBatch) -> str:
        """Return mechanism and bucket, such as "full:8", of a batch for which `can_run` is true."""
        return f"{self.backend.kind}:{self._bucket_of(batch)}"

    def run(self, batch: ForwardBatch) -> Tensor:
        """Replay the graph of a batch for which `can_run` is true; return hidden states [B, H], a
        view of its output.

        The next replay overwrites it. Raises StalePlanError as `GraphRunner.run` does.
        """
        size, attention = self._bucket_of(batch) or 0, self._context.attn_backend
        if not batch.num_tokens:
            batch = self._nothing
        captured = self._captured[size]
        check_generation(str(size), captured.generation, self._context)
        # Raises for a plan of another forward. Any other plan is replaced by the captured one,
        # refreshed below.
        batch.needs_forward_metadata_init(attention)
        self.registry.fill_from(batch, FillContext(batch.batch_size, size, batch.num_tokens, size))
        carry_host_arrays(batch, captured.batch)
        captured.batch.width = batch.width
        update = _refresh(attention, captured.plan, captured.halves, captured.batch)
        with forward_context(replace(self._context, batch=captured.batch)):
            output = captured.step.replay(update)
        return output[: batch.num_tokens]

    def _without_rows(self) -> ForwardBatch:
        """Return the decode batch of an idle shard, of which a replay has padding rows only."""
        batch = self.registry.view(0, 0, extend=False)
        batch.forward_mode = ForwardMode.DECODE
        read_host_arrays(batch)
        return batch

    def _capture(self, size: int) -> CapturedBucket:
        attention, batch = self._context.attn_backend, self._static_batch(size, size, ForwardMode.DECODE)
        batch.step_plan = self._plan_of(size)
        read_host_arrays(batch)
        halves = None if self._halves is None else self._halves.captured(size)
        plan = attention.capture_plan(Bucket(size, size)) if halves is None else None
        _refresh(attention, plan, halves, batch)
        context = replace(self._context, batch=batch)
        if halves is not None:
            step = self.backend.capture(lambda: halves.forward(self._forward, context, batch))
            return CapturedBucket(batch, None, halves, generation(self._context), step)
        assert plan is not None
        batch.mark_forward_metadata_ready(plan)
        with forward_context(context):
            step = self.backend.capture(lambda: self._forward(batch))
        return CapturedBucket(batch, plan, None, generation(self._context), step)


def _refresh(
    attention: AttentionBackend, plan: AttentionPlan | None, halves: CapturedSplit | None, batch: ForwardBatch
) -> HostUpdate | None:
    if halves is not None:
        return halves.refresh(batch)
    assert plan is not None
    return attention.refresh(plan, batch)
