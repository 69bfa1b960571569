"""The policy of prompt graphs: a bucket is a number of tokens, attention runs on the real rows under an eager plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from sglcore.device.batch import ForwardMode
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.graphs.backend import CapturedPrompt, Forward, PromptBackend
from sglcore.runtime.graphs.policy import SizedGraphs, check_generation, generation, planned, real_view

SMALLEST = 16
"""The smallest token bucket; prompts of less than half of it run eagerly."""
MOST_PADDING = 2
"""A bucket holds at most this many times the real tokens."""


@dataclass(frozen=True, slots=True)
class PromptForward:
    """What prompt graphs are captured of: a forward, the registry of prompts at its final size, and token buckets."""

    forward: Forward
    registry: BufferRegistry
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CapturedTokens:
    """A captured token bucket with its static batch, and the generation of the pools it was captured on."""

    batch: ForwardBatch
    generation: tuple[int, int]
    step: CapturedPrompt


def token_buckets(most: int) -> tuple[int, ...]:
    """Powers of two and the points midway between them, from SMALLEST to `most`, and `most` itself."""
    sizes, size = {most}, SMALLEST
    while size < most:
        sizes |= {size, min(size * 3 // 2, most)}
        size *= 2
    return tuple(sorted(sizes))


class PromptGraphs(SizedGraphs[CapturedTokens]):
    """Graphs of prompts and mixed steps by number of tokens."""

    def __init__(self, backend: PromptBackend, context: ForwardContext, forward: PromptForward) -> None:
        registry = forward.registry
        super().__init__(registry, context, forward.forward, forward.buckets, registry.max_num_tokens)
        self.backend = backend

    def bucket_for(self, size: int) -> int | None:
        """The smallest captured number of tokens that holds so many; None if there is none, or if most were padding."""
        found = super().bucket_for(size)
        return None if found is None or found > MOST_PADDING * size else found

    def can_run(self, batch: ForwardBatch) -> bool:
        """A prompt or mixed step that has a bucket, and no input that the graphs do not read."""
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return False
        if self.bucket_for(batch.num_tokens) is None or batch.batch_size > self.registry.max_bs:
            return False
        return self._reads_all(batch)

    def path(self, batch: ForwardBatch) -> str:
        """The mechanism and the bucket."""
        return f"{self.backend.prompt_kind}:{self.bucket_for(batch.num_tokens)}"

    def run(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H]: a view of the graph's output, which the next replay overwrites."""
        size = self.bucket_for(batch.num_tokens)
        assert size is not None
        captured = self._captured[size]
        check_generation(f"{size} tokens", captured.generation, self._context)
        view = real_view(self.registry, batch)
        self.registry.fill_from(batch, FillContext(batch.batch_size, batch.batch_size, batch.num_tokens, size))
        with planned(view, self._context):
            output = captured.step.replay(batch.num_tokens)
        return output[: batch.num_tokens]

    def _capture(self, size: int) -> CapturedTokens:
        batch = self._static_batch(1, size, ForwardMode.EXTEND)
        with forward_context(replace(self._context, batch=batch)):
            step = self.backend.capture_prompt(self._forward, batch)
        return CapturedTokens(batch, generation(self._context), step)
