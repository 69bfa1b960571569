"""What a graph mechanism is to the runner: it captures one forward of fixed shapes and replays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from sglcore.runtime.attention.contract import HostUpdate
from sglcore.runtime.forward_batch import ForwardBatch

Step: TypeAlias = Callable[[], Tensor]
Forward: TypeAlias = Callable[[ForwardBatch], Tensor]
"""A model's forward: hidden states [T, H] of a batch."""


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
        """Free every graph and the memory they share; what is captured afterwards starts anew."""
        ...


class CapturedPrompt(Protocol):
    """A captured forward of a token bucket."""

    def replay(self, num_tokens: int) -> Tensor:
        """Run it where the first `num_tokens` rows are real; returns its output buffer. The active context is that of the
        real batch, planned."""
        ...


@runtime_checkable
class PromptBackend(Protocol):
    """A mechanism that captures prompts too: what asks the context's segments runs between them."""

    @property
    def prompt_kind(self) -> str:
        """How paths name it."""
        ...

    def capture_prompt(self, forward: Forward, batch: ForwardBatch) -> CapturedPrompt:
        """Capture the forward of `batch`, whose tensors are static buffers."""
        ...
