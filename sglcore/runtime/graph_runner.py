"""Graphs: the policy here (what is captured, when it is replayed, what is compared), the mechanism in the device's `GraphBackend`.

The runner composes; nothing subclasses it. A graph holds strong references to all that it baked in.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglcore.device.collection import no_collection
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext
from sglcore.runtime.graphs.backend import Forward, GraphBackend, PromptBackend
from sglcore.runtime.graphs.decode import DecodeGraphs
from sglcore.runtime.graphs.policy import planned, real_view
from sglcore.runtime.graphs.prompts import PromptForward, PromptGraphs
from sglcore.runtime.graphs.shadow import Held, Shadow, leaving_cells
from sglcore.runtime.streams import Streams

if TYPE_CHECKING:
    from sglcore.runtime.overlap.halves import Halves

Policy = DecodeGraphs | PromptGraphs


class GraphRunner:
    """Graphs of decode steps, and of prompts where the mechanism has them. `memory`: bytes that capture took of the device
    (None: not told there). `shadow` counts the replays that were compared."""

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
        halves: Halves | None = None,
    ) -> None:
        """Capture `forward` for every bucket, the largest first. Waits; `progress(done, total)` after each.

        All device work, the capture included, goes to the forward stream of `streams`. `halves`: how decodes are cut in two.
        """
        self.backend = backend
        self.memory: int | None = None
        self.shadow = Shadow(shadow) if shadow else None
        self.decode = DecodeGraphs(backend, registry, context, forward, buckets, needs_host_lengths, halves)
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
        """Captured batch sizes, ascending."""
        return () if self._closed else self.decode.sizes

    def can_run(self, batch: ForwardBatch) -> bool:
        """A graph can run this batch: it has a bucket, and no input that graphs do not read."""
        policy = self._policy(batch)
        return policy is not None and policy.can_run(batch)

    def path(self, batch: ForwardBatch) -> str:
        """How the replay of a batch is called: the mechanism and the bucket."""
        policy = self._policy(batch)
        return "eager" if policy is None else policy.path(batch)

    def run(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H] of a batch whose data lie in this runner's registry; the next replay overwrites them.

        Does not wait for the device, but where shadow mode compares. Raises StalePlanError if the KV pool moved since
        capture, or if the batch was planned for another forward; ShadowMismatch if the comparison fails.
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
        """Free every graph and capture all of them again: after the KV pool moved, or weights were replaced. Waits."""
        for policy in self._policies:
            policy.drop()
        self.backend.close()
        self._capture_all()

    def close(self) -> None:
        """Free the graphs; every batch is eager from now on. Waits for the device."""
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
        return self.decode if batch.forward_mode.is_decode else self.prompts

    @torch.inference_mode()
    def _capture_all(self) -> None:
        total, done = sum(len(policy.sizes) for policy in self._policies), 0
        free = _free_memory(self._streams)
        schedule, forward = self._streams.schedule, self._streams.forward
        if schedule is not None and forward is not None:
            forward.wait_stream(schedule)  # it has queued weights and buffers
        if forward is not None:
            gc.collect()  # what garbage holds of the device's memory is for the graphs to take
        # A finalizer that frees device memory breaks a capture.
        with no_collection(), self._streams.running():
            # Prompts hold more memory, and come first: what they leave in the pool serves the decode graphs.
            for policy in reversed(self._policies):
                for _ in policy.capture():
                    done += 1
                    if self._progress is not None:
                        self._progress(done, total)
        if free is not None:
            self.memory = max(0, free - (_free_memory(self._streams) or 0))

    def _run_beside(self, policy: Policy, batch: ForwardBatch, before: Held) -> Tensor:
        """An eager forward of the same inputs that leaves no trace; it begins with what was there `before`."""
        view = replace(real_view(policy.registry, batch), plan_record=None)
        after = before.now()
        before.write()
        with planned(view, self._context):
            hidden = leaving_cells(self._context, view, lambda: self._forward(view))
        after.write()
        return hidden


def _owned(batch: ForwardBatch, hidden: Tensor, beside: Tensor) -> Tensor:
    """hidden [T, H], but `beside` where a decode has a token of slot 0, which is nobody's."""
    if not batch.forward_mode.is_decode:
        return hidden
    return torch.where(batch.req_pool_indices.unsqueeze(1) > 0, hidden, beside)


def _free_memory(streams: Streams) -> int | None:
    """Bytes free on the device of the forward stream, once it is idle; None where there is none to ask."""
    if streams.forward is None or not torch.accelerator.is_available():
        return None
    torch.accelerator.synchronize(streams.forward.device.index)
    torch.accelerator.empty_cache()
    return torch.accelerator.get_memory_info(streams.forward.device.index)[0]
