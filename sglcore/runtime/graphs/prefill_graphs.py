"""Policy of prefill graphs: a bucket is a number of tokens.

Attention runs on the real rows with an eager plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.graphs.graph_backend import CapturedPrompt, Forward, PromptBackend
from sglcore.runtime.graphs.graph_policy import SizedGraphs, check_generation, generation, planned, real_view
from sglcore.worker.schedule_batch import ForwardMode

SMALLEST = 16
"""The smallest token bucket; prefills of less than half of it run eagerly."""
MOST_PADDING = 2
"""Maximum ratio of a bucket's tokens to the real tokens."""


@dataclass(frozen=True, slots=True)
class PromptForward:
    """What prefill graphs capture: a forward, the prefill registry, which does not grow afterwards,
    and the token buckets.
    """

    forward: Forward
    registry: BufferRegistry
    buckets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CapturedTokens:
    """A captured token bucket with its static batch, and the generation of the pools at capture."""

    batch: ForwardBatch
    generation: tuple[int, int]
    step: CapturedPrompt


def token_buckets(most: int) -> tuple[int, ...]:
    """Return powers of two from SMALLEST and their midpoints (16, 24, 32, 48, ...), below `most`,
    and `most`, ascending.
    """
    sizes, size = {most}, SMALLEST
    while size < most:
        sizes |= {size, min(size * 3 // 2, most)}
        size *= 2
    return tuple(sorted(sizes))


class PromptGraphs(SizedGraphs[CapturedTokens]):
    """Captures and replays prefill and mixed steps, padded to the next token bucket."""

    def __init__(self, backend: PromptBackend, context: ForwardContext, forward: PromptForward) -> None:
        registry = forward.registry
        super().__init__(registry, context, forward.forward, forward.buckets, registry.max_num_tokens)
        self.backend = backend

    def bucket_for(self, size: int) -> int | None:
        """Return the smallest bucket that holds `size` tokens.

        None if there is none or padding exceeds MOST_PADDING.
        """
        found = super().bucket_for(size)
        return None if found is None or found > MOST_PADDING * size else found

    def _fits(self, batch: ForwardBatch) -> bool:
        """Return whether the batch is a prefill or mixed step for which there is a bucket."""
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return False
        return batch.batch_size <= self.registry.max_bs and self.bucket_for(batch.num_tokens) is not None

    def path(self, batch: ForwardBatch) -> str:
        """Return mechanism and bucket, such as "breakable:64", of a batch for which `can_run` is
        true.
        """
        return f"{self.backend.prompt_kind}:{self.bucket_for(batch.num_tokens)}"

    def run(self, batch: ForwardBatch) -> Tensor:
        """Replay the graph of a batch for which `can_run` is true; return hidden states [T, H], a
        view of its output.

        The next replay overwrites it. Raises StalePlanError as `GraphRunner.run` does.
        """
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
