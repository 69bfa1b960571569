"""The policy of decode graphs: a bucket is a batch size, its plan is refreshed in place before each replay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from sglcore.device.batch import ForwardMode
from sglcore.runtime.attention.contract import AttentionBackend, AttentionPlan, Bucket
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.graphs.backend import CapturedStep, GraphBackend
from sglcore.runtime.graphs.policy import (
    absent_inputs,
    carry_host_arrays,
    check_generation,
    has_only,
    read_host_arrays,
)


@dataclass(frozen=True, slots=True)
class CapturedBucket:
    """A graph with everything it reads: its static batch view, its plan, and the pool generation it was captured on."""

    bucket: Bucket
    batch: ForwardBatch
    plan: AttentionPlan
    generation: int
    step: CapturedStep


class DecodeGraphs:
    """Decode graphs by batch size. Pads a batch up to the next captured size and replays."""

    def __init__(
        self,
        backend: GraphBackend,
        registry: BufferRegistry,
        attn_backend: AttentionBackend,
        context: ForwardContext,
        forward: Callable[[ForwardBatch], Tensor],
        buckets: tuple[int, ...],
        needs_host_lengths: bool = False,
    ) -> None:
        """Captures nothing yet. `needs_host_lengths`: a replay must be told lengths from the host."""
        self.backend = backend
        self.registry = registry
        self.sizes = tuple(sorted(size for size in set(buckets) if 0 < size <= registry.max_bs))
        self._attn = attn_backend
        self._context = context
        self._forward = forward
        self._needs_host_lengths = needs_host_lengths
        self._captured: dict[int, CapturedBucket] = {}
        self._absent: tuple[str, ...] = ()
        registry.freeze()

    def capture(self) -> Iterator[int]:
        """Capture every size, the largest first; yields each when it is done."""
        for size in reversed(self.sizes):
            self._captured[size] = self._capture(Bucket(size, size))
            yield size
        if self.sizes:
            self._absent = absent_inputs(self._captured[self.sizes[0]].batch)

    def bucket_for(self, batch_size: int) -> int | None:
        """The smallest captured size that holds the batch; None if there is none."""
        place = bisect_left(self.sizes, batch_size)
        return self.sizes[place] if batch_size and place < len(self.sizes) else None

    def can_run(self, batch: ForwardBatch) -> bool:
        """The batch has a bucket, and no input that the graphs do not read; its lengths are on the host if need be."""
        if self.bucket_for(batch.batch_size) is None or (self._needs_host_lengths and batch.seq_lens_cpu is None):
            return False
        return has_only(batch, self._absent)

    def path(self, batch: ForwardBatch) -> str:
        """The mechanism and the bucket."""
        return f"{self.backend.kind}:{self.bucket_for(batch.batch_size)}"

    def run(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [B, H]: a view of the graph's output, which the next replay overwrites."""
        captured = self._captured[self.bucket_for(batch.batch_size) or 0]
        check_generation(str(captured.bucket.batch_size), captured.generation, self._attn)
        # A plan for another forward raises here; any other is superseded by the captured one, which is refreshed below.
        batch.needs_forward_metadata_init(self._attn)
        ctx = FillContext(batch.batch_size, captured.bucket.batch_size, batch.num_tokens, captured.bucket.num_tokens)
        self.registry.fill_from(batch, ctx)
        carry_host_arrays(batch, captured.batch)
        update = self._attn.refresh(captured.plan, captured.batch)
        with forward_context(ForwardContext(self._attn, captured.batch, self._context.layers)):
            output = captured.step.replay(update)
        return output[: batch.num_tokens]

    def _capture(self, bucket: Bucket) -> CapturedBucket:
        template = self.registry.view(bucket.batch_size, bucket.num_tokens, extend=False)
        template.forward_mode = ForwardMode.DECODE
        self.registry.fill_from(template, FillContext(0, bucket.batch_size, 0, bucket.num_tokens))
        batch = self.registry.extract_buffer(template, bucket.batch_size, bucket.num_tokens)
        read_host_arrays(batch)
        plan = self._attn.capture_plan(bucket)
        self._attn.refresh(plan, batch)
        batch.mark_forward_metadata_ready(plan)
        with forward_context(ForwardContext(self._attn, batch, self._context.layers)):
            step = self.backend.capture(lambda: self._forward(batch))
        return CapturedBucket(bucket, batch, plan, self._attn.token_to_kv_pool.generation, step)

    def drop(self) -> None:
        """Forget the captured graphs; the mechanism frees them."""
        self._captured.clear()
