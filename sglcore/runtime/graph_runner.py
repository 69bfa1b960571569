"""Graphs: the policy here (buckets, padding, plan refresh, progress), the mechanism in the device's `GraphBackend`.

The runner composes; nothing subclasses it. A graph holds strong references to all that it baked in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sglcore.device.batch import ForwardMode
from sglcore.runtime.attention.contract import AttentionBackend, AttentionPlan, Bucket, HostUpdate
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.fields import Axis, Split, specs
from sglcore.runtime.forward_batch import ForwardBatch, StalePlanError
from sglcore.runtime.forward_context import ForwardContext, forward_context

Step = Callable[[], Tensor]


class CapturedStep(Protocol):
    """One captured forward; calling `replay` runs it on what the buffers hold."""

    def replay(self, update: HostUpdate | None) -> Tensor:
        """Run it and return its output buffer; `update` is what `refresh` gave for this vendor's graph."""
        ...


class GraphBackend(Protocol):
    """The capture mechanism of a device."""

    @property
    def kind(self) -> str:
        """The kind of graph it makes, as the package names it."""
        ...

    def capture(self, step: Step) -> CapturedStep:
        """Capture one forward. `step` reads only static buffers; it may be called several times to warm up."""
        ...

    def close(self) -> None:
        """Free every graph and the memory they share."""
        ...


@dataclass(frozen=True, slots=True)
class CapturedBucket:
    """A graph with everything it reads: its static batch view, its plan, and the pool generation it was captured on."""

    bucket: Bucket
    batch: ForwardBatch
    plan: AttentionPlan
    generation: int
    step: CapturedStep


class GraphRunner:
    """Decode graphs by bucket: pads a batch up to the next captured size and replays."""

    def __init__(
        self,
        backend: GraphBackend,
        registry: BufferRegistry,
        attn_backend: AttentionBackend,
        context: ForwardContext,
        forward: Callable[[ForwardBatch], Tensor],
        buckets: tuple[int, ...],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Capture `forward` for every bucket, the largest first. Waits; `progress(done, total)` after each."""
        self.backend = backend
        self.registry = registry
        self.attn_backend = attn_backend
        self._context = context
        self._forward = forward
        self._sizes = tuple(sorted(size for size in set(buckets) if 0 < size <= registry.max_bs))
        self._captured: dict[int, CapturedBucket] = {}
        self._absent: tuple[str, ...] = ()
        registry.freeze()
        for done, size in enumerate(reversed(self._sizes), 1):
            self._captured[size] = self._capture(Bucket(size, size))
            if progress is not None:
                progress(done, len(self._sizes))
        if self._sizes:
            self._absent = _absent_inputs(self._captured[self._sizes[0]].batch)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Captured batch sizes, ascending."""
        return self._sizes

    def bucket_for(self, batch_size: int) -> int | None:
        """The smallest captured size that holds the batch; None if there is none."""
        place = bisect_left(self._sizes, batch_size)
        return self._sizes[place] if batch_size and place < len(self._sizes) else None

    def can_run(self, batch: ForwardBatch) -> bool:
        """This batch has a bucket: plain decode, no more rows than the largest, no input that the graphs do not read."""
        if not batch.forward_mode.is_decode or self.bucket_for(batch.batch_size) is None:
            return False
        return all(getattr(batch, name) is None for name in self._absent)

    def run(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H] of a batch whose data lie in this runner's registry. Does not wait for the device.

        Raises StalePlanError if the KV pool moved since capture, or if the batch was planned for another forward.
        """
        captured = self._captured[self.bucket_for(batch.batch_size) or 0]
        generation = self.attn_backend.token_to_kv_pool.generation
        if captured.generation != generation:
            raise StalePlanError(
                f"the graph of bucket {captured.bucket.batch_size} was captured over generation {captured.generation} "
                f"of the KV pool, it is now {generation}; capture again after replacing the pool"
            )
        # A plan for another forward raises here; any other is superseded by the captured one, which is refreshed below.
        batch.needs_forward_metadata_init(self.attn_backend)
        ctx = FillContext(batch.batch_size, captured.bucket.batch_size, batch.num_tokens, captured.bucket.num_tokens)
        self.registry.fill_from(batch, ctx)
        captured.batch.seq_lens_cpu = batch.seq_lens_cpu
        update = self.attn_backend.refresh(captured.plan, captured.batch)
        context = ForwardContext(self.attn_backend, captured.batch, self._context.layers)
        with forward_context(context):
            output = captured.step.replay(update)
        return output[: batch.num_tokens]

    def _capture(self, bucket: Bucket) -> CapturedBucket:
        template = self.registry.view(ForwardBatch, bucket.batch_size, bucket.num_tokens, False)
        template.forward_mode = ForwardMode.DECODE
        self.registry.fill_from(template, FillContext(0, bucket.batch_size, 0, bucket.num_tokens))
        batch = self.registry.extract_buffer(template, bucket.batch_size, bucket.num_tokens)
        assert batch.seq_lens is not None
        batch.seq_lens_cpu = batch.seq_lens.cpu().numpy()
        plan = self.attn_backend.capture_plan(bucket)
        self.attn_backend.refresh(plan, batch)
        batch.mark_forward_metadata_ready(plan)
        with forward_context(ForwardContext(self.attn_backend, batch, self._context.layers)):
            step = self.backend.capture(lambda: self._forward(batch))
        return CapturedBucket(bucket, batch, plan, self.attn_backend.token_to_kv_pool.generation, step)

    def close(self) -> None:
        """Free the graphs; every batch is eager from now on."""
        self._captured.clear()
        self._sizes = ()
        self.backend.close()


def _absent_inputs(captured: ForwardBatch) -> tuple[str, ...]:
    """Inputs of a model that a captured batch does not have, so that its graph can not read them."""
    inputs = [s for s in specs(ForwardBatch) if s.is_slot or s.axis is Axis.TOKENS or s.split is Split.NESTED]
    return tuple(spec.name for spec in inputs if getattr(captured, spec.name) is None)
