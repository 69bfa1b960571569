"""The policy of prompt graphs: a bucket is a number of tokens, attention runs on the real rows under an eager plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from sglcore.device.batch import ForwardMode
from sglcore.runtime.attention.contract import AttentionBackend
from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext, forward_context
from sglcore.runtime.graphs.backend import CapturedPrompt, Forward, PromptBackend
from sglcore.runtime.graphs.policy import absent_inputs, check_generation, has_only, planned, real_view

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
    """A captured token bucket with its static batch, and the pool generation it was captured on."""

    batch: ForwardBatch
    generation: int
    step: CapturedPrompt


def token_buckets(most: int) -> tuple[int, ...]:
    """Powers of two and the points midway between them, from SMALLEST to `most`, and `most` itself."""
    sizes, size = {most}, SMALLEST
    while size < most:
        sizes |= {size, min(size * 3 // 2, most)}
        size *= 2
    return tuple(sorted(sizes))


class PromptGraphs:
    """Graphs of prompts and mixed steps by number of tokens."""

    def __init__(
        self,
        backend: PromptBackend,
        attn_backend: AttentionBackend,
        context: ForwardContext,
        forward: PromptForward,
    ) -> None:
        """Captures nothing yet; the registry keeps its size from here on."""
        self.backend = backend
        self.registry = forward.registry
        self.sizes = tuple(sorted(n for n in set(forward.buckets) if 0 < n <= self.registry.max_num_tokens))
        self._forward = forward.forward
        self._attn = attn_backend
        self._context = context
        self._captured: dict[int, CapturedTokens] = {}
        self._absent: tuple[str, ...] = ()
        self.registry.freeze()

    def capture(self) -> Iterator[int]:
        """Capture every size, the largest first; yields each when it is done."""
        for size in reversed(self.sizes):
            self._captured[size] = self._capture(size)
            yield size
        if self.sizes:
            self._absent = absent_inputs(self._captured[self.sizes[0]].batch)

    def bucket_for(self, num_tokens: int) -> int | None:
        """The smallest captured size that holds the tokens; None if there is none, or if most of it were padding."""
        place = bisect_left(self.sizes, num_tokens)
        if place == len(self.sizes) or self.sizes[place] > MOST_PADDING * num_tokens:
            return None
        return self.sizes[place]

    def can_run(self, batch: ForwardBatch) -> bool:
        """A prompt or mixed step that has a bucket, and no input that the graphs do not read."""
        if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
            return False
        if self.bucket_for(batch.num_tokens) is None or batch.batch_size > self.registry.max_bs:
            return False
        return has_only(batch, self._absent)

    def path(self, batch: ForwardBatch) -> str:
        """The mechanism and the bucket."""
        return f"{self.backend.prompt_kind}:{self.bucket_for(batch.num_tokens)}"

    def run(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H]: a view of the graph's output, which the next replay overwrites."""
        size = self.bucket_for(batch.num_tokens)
        assert size is not None
        captured = self._captured[size]
        check_generation(f"{size} tokens", captured.generation, self._attn)
        view = real_view(self.registry, batch)
        self.registry.fill_from(batch, FillContext(batch.batch_size, batch.batch_size, batch.num_tokens, size))
        with planned(self._attn, view, self._context):
            output = captured.step.replay(batch.num_tokens)
        return output[: batch.num_tokens]

    def _capture(self, size: int) -> CapturedTokens:
        template = self.registry.view(1, size, extend=True)
        template.forward_mode = ForwardMode.EXTEND
        self.registry.fill_from(template, FillContext(0, 1, 0, size))
        batch = self.registry.extract_buffer(template, 1, size)
        with forward_context(ForwardContext(self._attn, batch, self._context.layers)):
            step = self.backend.capture_prompt(self._forward, batch)
        return CapturedTokens(batch, self._attn.token_to_kv_pool.generation, step)

    def drop(self) -> None:
        """Forget the captured graphs; the mechanism frees them."""
        self._captured.clear()
