"""Defects planted in the graphs of data-parallel shards. Every rank imports this module, so it
imports little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from sglcore.runtime.buffer_registry import BufferRegistry
from sglcore.runtime.graphs import decode_graphs, graph_choice
from sglcore.runtime.model_runner import ModelRunner
from sglcore.runtime.parallel import process_group
from sglcore.worker.step_plan import StepPlan
from sglcore_cpu import native_graphs
from sglcore_cpu.recording import NotCapturable


def soon(defect: Callable[[int], None], rank: int) -> None:
    """Plant a defect in a rank whose collectives wait for three seconds at most."""
    process_group.TIMEOUT = timedelta(seconds=3)
    defect(rank)


def idle_runs_nothing(rank: int) -> None:
    """A shard without rows answers a step that the others replay, and does not replay it."""
    own = ModelRunner.forward

    def forward(self: ModelRunner, batch: Any) -> Any:
        if batch.step_plan.bucket is not None and not batch.num_tokens:
            return self.prefill_registry.input_buffer("positions").tensor.new_zeros(0, 1).float(), "eager"
        return own(self, batch)

    ModelRunner.forward = forward


def idle_runs_eagerly(rank: int) -> None:
    """A shard without rows runs a step without its rows that the others replay."""
    own = ModelRunner.forward

    def forward(self: ModelRunner, batch: Any) -> Any:
        if batch.step_plan.bucket is not None and not batch.num_tokens:
            batch.step_plan = replace(batch.step_plan, bucket=None)
        return own(self, batch)

    ModelRunner.forward = forward


def another_bucket(rank: int) -> None:
    """The second shard replays its largest graph, whatever was agreed."""
    if rank:
        changed: Any = decode_graphs.DecodeGraphs
        changed._bucket_of = lambda self, batch: None if batch.step_plan.bucket is None else self.sizes[-1]


def own_bucket(rank: int) -> None:
    """Each shard replays the smallest graph that holds its own rows, as without shards."""
    changed: Any = decode_graphs.DecodeGraphs
    changed._bucket_of = lambda self, batch: self.bucket_for(max(batch.num_tokens, 1))


def own_sizes(rank: int) -> None:
    """The second rank captures other sizes."""
    own = graph_choice._within_limit

    def within_limit(*given: Any) -> Any:
        buckets, prompts = own(*given)
        return buckets[rank:], prompts

    graph_choice._within_limit = within_limit


def captures_nothing(rank: int) -> None:
    """The second rank finds while it captures that it cannot, and goes on eagerly by itself."""
    own = native_graphs.NativeGraphs.capture

    def capture(self: Any, step: Any) -> Any:
        if rank:
            raise NotCapturable("a call of this rank alone")
        return own(self, step)

    native_graphs.NativeGraphs.capture = capture


def not_captured(rank: int) -> None:
    """The ranks derive a size from the plan that none of them has captured."""
    own = ModelRunner.replayed

    def replayed(self: ModelRunner, plan: StepPlan) -> StepPlan:
        found = own(self, plan)
        return found if found.bucket is None else replace(found, bucket=found.bucket + 1)

    ModelRunner.replayed = replayed


def padding_is_real(rank: int) -> None:
    """Padding rows write their keys and values to the KV slot of the first row."""
    own = BufferRegistry.fill_from

    def fill_from(self: BufferRegistry, batch: Any, ctx: Any, skip: Any = ()) -> None:
        own(self, batch, ctx, skip)
        cells = self.input_buffer("out_cache_loc").tensor
        cells[ctx.raw_num_tokens : ctx.padded_num_tokens] = cells[0] if ctx.raw_bs else 0

    BufferRegistry.fill_from = fill_from


def padding_is_returned(rank: int) -> None:
    """A replay returns the hidden states of padding rows too."""
    own = decode_graphs.DecodeGraphs.run

    def run(self: Any, batch: Any) -> Any:
        own(self, batch)
        return self._captured[batch.step_plan.bucket].step.output

    decode_graphs.DecodeGraphs.run = run


def drafts_by_own_rows(rank: int) -> None:
    """A draft forward replays the graph for this shard's own rows."""
    own = ModelRunner.replayed

    def replayed(self: ModelRunner, plan: StepPlan) -> StepPlan:
        found = own(self, plan)
        captured = () if self.graphs is None else self.graphs.buckets
        sizes = [size for size in captured if size >= plan.global_num_tokens[plan.shard]]
        return replace(found, bucket=None if found.bucket is None else sizes[0])

    ModelRunner.replayed = replayed
