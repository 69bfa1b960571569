"""The interface of a graph mechanism: it captures a forward of fixed shapes and replays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from sglcore.runtime.attention.contract import HostUpdate
from sglcore.runtime.forward_batch import ForwardBatch

Step: TypeAlias = Callable[[], Tensor]
Forward: TypeAlias = Callable[[ForwardBatch], Tensor]
"""A model's forward: returns hidden states [T, H] of a batch."""


class CapturedStep(Protocol):
    """One captured forward; `replay` runs it on the present contents of the buffers."""

    def replay(self, update: HostUpdate | None) -> Tensor:
        """Run it and return its output buffer, which the next replay overwrites.

        `update` is the result of the attention backend's `refresh`.
        """
        ...


class GraphBackend(Protocol):
    """One kind of graph on a device: captures decode forwards of fixed shapes so that they can be
    replayed. The factories in `DevicePackage.graphs` make it.
    """

    @property
    def kind(self) -> str:
        """The kind of graph, as the device package names it."""
        ...

    def capture(self, step: Step) -> CapturedStep:
        """Capture one forward.

        `step` reads only static buffers; it may be called several times to warm up.
        """
        ...

    def close(self) -> None:
        """Free every graph and their shared memory; later captures start from nothing."""
        ...


class CapturedPrompt(Protocol):
    """One captured prefill forward of a token bucket; `PromptBackend.capture_prompt` makes it."""

    def replay(self, num_tokens: int) -> Tensor:
        """Run it with the first `num_tokens` rows real, and return its output buffer.

        The active context must have the real batch, with its plan.
        """
        ...


@runtime_checkable
class PromptBackend(Protocol):
    """A `GraphBackend` that also captures prefill forwards.

    Calls that layers make through the context's `segments` run between captured segments.
    """

    @property
    def prompt_kind(self) -> str:
        """The name of prefill graphs in `StepOutput.path`."""
        ...

    def capture_prompt(self, forward: Forward, batch: ForwardBatch) -> CapturedPrompt:
        """Capture the forward of `batch`; its tensors are static buffers."""
        ...
