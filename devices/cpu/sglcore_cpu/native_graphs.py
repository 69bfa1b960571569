"""Native graphs: a decode step is recorded as a list of kernel calls and replayed without Python
between its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglcore.device.facts import Facts
from sglcore.runtime.streams import Streams
from sglcore_cpu.recording import Part, Recording, StepArena


@dataclass(frozen=True, slots=True)
class NativeStep:
    """The `CapturedStep` of a recorded forward, with its output buffer. `step` keeps the inputs of
    the calls alive (model, batch, plan), `arena` the memory of their results."""

    parts: tuple[Part, ...]
    output: Tensor
    step: Callable[[], Tensor]
    arena: StepArena

    @torch.inference_mode()
    def replay(self, update: object | None) -> Tensor:
        """Run the step on the current contents of its buffers and wait; return the output buffer.
        The next replay of any bucket overwrites the output. `update` is not used."""
        for part in self.parts:
            part.run()
        return self.output


class NativeGraphs:
    """The `GraphBackend` that records steps. The results of all its steps share memory, because
    steps of one worker never run at the same time."""

    kind = "native"

    def __init__(self) -> None:
        self._arena = StepArena()

    def capture(self, step: Callable[[], Tensor]) -> NativeStep:
        """Run the step's Python code once and record its calls; kernels do not run, and torch
        operations run on zeros. Raises NotCapturable if the step reads a result on the host or uses
        two engines."""
        with Recording(self._arena) as recording:
            output = step()
        return NativeStep(tuple(recording.parts), output, step, self._arena)

    def close(self) -> None:
        """Let go of the shared memory: captured steps keep it while they exist, steps captured
        later get new memory."""
        self._arena = StepArena()


def native(facts: Facts, streams: Streams) -> NativeGraphs:
    """Make the graphs of kind `native`; a processor has no streams, so `streams` is not used."""
    return NativeGraphs()
