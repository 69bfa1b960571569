"""Graph policy: what is captured, when it is replayed, what is compared.

The mechanism is the device's `GraphBackend`. The runner composes; nothing subclasses it. A graph
holds references to every tensor that it reads or writes, because it captured the addresses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sglcore.core.garbage_collection import no_collection
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext
from sglcore.runtime.graphs.decode_graphs import DecodeGraphs, PlanOfBucket, one_shard
from sglcore.runtime.graphs.graph_backend import Forward, GraphBackend, PromptBackend
from sglcore.runtime.graphs.graph_policy import planned, real_view
from sglcore.runtime.graphs.prefill_graphs import PromptForward, PromptGraphs
from sglcore.runtime.graphs.shadow_mode import Held, Shadow, leaving_cells
from sglcore.runtime.split_forward import SplitForward
from sglcore.runtime.streams import Streams

Policy = DecodeGraphs | PromptGraphs


class GraphRunner:
    """Captures graphs of decode steps, and of prefill steps if `prompts` is given, and replays
    them.

    `memory`: bytes of device memory that capture took (None: not reported). `shadow` compares every
    Nth replay with an eager forward (None: no replay).
    """

    def __init__(
        self,
        backend: GraphBackend,
        registry: BufferRegistry,
        context: ForwardContext,
        forward: Forward,
        buckets: tuple[int, ...],
        progress: Callable[[int, int], None] | None = None,
        *,
        prompts: PromptForward | None = None,
        streams: Streams = Streams(),
        shadow: int = 0,
        needs_host_lengths: bool = False,
        halves: SplitForward | None = None,
        plan_of: PlanOfBucket = one_shard,
    ) -> None:
        """Capture `forward` for every bucket of decode rows, and before that the prefill forward of
        `prompts` for each of its buckets; of each kind the largest first.

        Calls `progress(done, total)` after each. Waits. All device work, including capture, runs on
        the forward stream of `streams`. `halves`: how decode batches are split into two
        micro-batches. `plan_of`: the plan that data-parallel shards capture each decode size under.
        """
        self.backend = backend
        self.memory: int | None = None
        self.shadow = Shadow(shadow) if shadow else None
        self.decode = DecodeGraphs(backend, registry, context, forward, buckets, needs_host_lengths, halves, plan_of)
        self.prompts: PromptGraphs | None = None
        if prompts is not None:
            if not isinstance(backend, PromptBackend):
                raise TypeError(f"graphs of kind {backend.kind!r} capture no prompts")
            self.prompts = PromptGraphs(backend, context, prompts)
        self._context = context
        self._forward = forward
        self._streams = streams
        self._progress = progress
        self._closed = False
        self._capture_all()

    @property
    def buckets(self) -> tuple[int, ...]:
        """Captured sizes of decode batches, in rows, ascending; empty after `close`."""
        return () if self._closed else self.decode.sizes

    def can_run(self, batch: ForwardBatch) -> bool:
        """Return whether a graph can run this batch: there is a bucket for it, and the graph reads
        all its inputs. False after `close`.
        """
        policy = self._policy(batch)
        return policy is not None and policy.can_run(batch)

    def unread(self, batch: ForwardBatch) -> tuple[str, ...]:
        """Return the names of the batch's inputs that the graph of its bucket does not read, which
        keep it from that graph; empty if it has no bucket, or a graph can run it.
        """
        policy = self._policy(batch)
        return () if policy is None else policy.unread(batch)

    def path(self, batch: ForwardBatch) -> str:
        """Return the name of a batch's replay, mechanism and bucket, such as "full:8"; "eager" if
        no graph is for its kind of step. Call only if `can_run` is true.
        """
        policy = self._policy(batch)
        return "eager" if policy is None else policy.path(batch)

    def run(self, batch: ForwardBatch) -> Tensor:
        """Return hidden states [T, H] of a batch in this runner's registry for which `can_run` is
        true.

        The next replay overwrites them. Does not wait for the device, except for a comparison in
        shadow mode. Raises StalePlanError if the KV pool moved after capture or the batch was
        planned for another forward, ShadowMismatch if the comparison fails.
        """
        policy = self._policy(batch)
        assert policy is not None
        if self.shadow is None or not self.shadow.is_due():
            return policy.run(batch)
        size, count = batch.batch_size, batch.num_tokens
        policy.registry.fill_from(batch, FillContext(size, size, count, count))
        before = Held.of(self._context, real_view(policy.registry, batch))
        hidden = policy.run(batch)
        beside = self._run_beside(policy, batch, before)
        self.shadow.compare(policy.path(batch), _owned(batch, hidden, beside), beside)
        return hidden

    def recapture(self) -> None:
        """Free all graphs and capture them again, after the KV pool moved or weights were replaced.

        Waits.
        """
        for policy in self._policies:
            policy.drop()
        self.backend.close()
        self._capture_all()

    def close(self) -> None:
        """Free the graphs; later batches run eagerly. Waits for the device."""
        for policy in self._policies:
            policy.drop()
        self._closed = True
        self.backend.close()

    @property
    def _policies(self) -> tuple[Policy, ...]:
        return (self.decode,) if self.prompts is None else (self.decode, self.prompts)

    def _policy(self, batch: ForwardBatch) -> Policy | None:
        if self._closed:
            return None
        if batch.step_plan is not None:
            return self.decode if batch.step_plan.bucket is not None else None
        return self.decode if batch.forward_mode.is_decode else self.prompts

    @torch.inference_mode()
    def _capture_all(self) -> None:
        total, done = sum(len(policy.sizes) for policy in self._policies), 0
        free = _free_memory(self._streams)
        schedule, forward = self._streams.schedule, self._streams.forward
        if schedule is not None and forward is not None:
            forward.wait_stream(schedule)  # where weights and buffers were queued
        if forward is not None:
            gc.collect()  # frees the device memory that garbage holds, for the graphs
        # A finalizer that frees device memory would break a capture.
        with no_collection(), self._streams.running():
            # Prefill needs more memory and is captured first; decode graphs reuse that memory in
            # the pool.
            for policy in reversed(self._policies):
                for _ in policy.capture():
                    done += 1
                    if self._progress is not None:
                        self._progress(done, total)
        if free is not None:
            self.memory = max(0, free - (_free_memory(self._streams) or 0))

    def _run_beside(self, policy: Policy, batch: ForwardBatch, before: Held) -> Tensor:
        """Run the same inputs eagerly from the state `before`; return hidden states [T, H] and
        restore the state afterwards.
        """
        view = replace(real_view(policy.registry, batch), plan_record=None)
        after = before.now()
        before.write()
        with planned(view, self._context):
            hidden = leaving_cells(self._context, view, lambda: self._forward(view))
        after.write()
        return hidden


def _owned(batch: ForwardBatch, hidden: Tensor, beside: Tensor) -> Tensor:
    """Return `hidden` [T, H] of a replay; in a decode, rows of slot 0 (padding) are those of the
    eager result `beside`, so that they compare equal.
    """
    if not batch.forward_mode.is_decode:
        return hidden
    return torch.where(batch.req_pool_indices.unsqueeze(1) > 0, hidden, beside)


def _free_memory(streams: Streams) -> int | None:
    """Return the free bytes on the forward stream's device: wait until it is idle, empty the cache
    of torch's allocator, then measure.

    None without streams, or without an accelerator.
    """
    if streams.forward is None or not torch.accelerator.is_available():
        return None
    torch.accelerator.synchronize(streams.forward.device.index)
    torch.accelerator.empty_cache()
    return torch.accelerator.get_memory_info(streams.forward.device.index)[0]
