"""The processor's own graph: a decode step as one list of kernel calls, run without Python between
its layers."""

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
    """A recorded forward and its output buffer. `step` holds what the calls read: model, batch,
    plan; `arena` where they write."""

    parts: tuple[Part, ...]
    output: Tensor
    step: Callable[[], Tensor]
    arena: StepArena

    @torch.inference_mode()
    def replay(self, update: object | None) -> Tensor:
        """Run it on what the buffers hold; the output is overwritten by the next replay of any
        bucket."""
        for part in self.parts:
            part.run()
        return self.output


class NativeGraphs:
    """Records steps. Their results share memory: steps of one worker never run at the same time."""

    kind = "native"

    def __init__(self) -> None:
        self._arena = StepArena()

    def capture(self, step: Callable[[], Tensor]) -> NativeStep:
        """Walk through it once and keep what it calls. Raises NotCapturable if it reads a result on
        the host."""
        with Recording(self._arena) as recording:
            output = step()
        return NativeStep(tuple(recording.parts), output, step, self._arena)

    def close(self) -> None:
        """What is captured afterwards has memory of its own."""
        self._arena = StepArena()


def native(facts: Facts, streams: Streams) -> NativeGraphs:
    """Decode steps as lists of kernel calls. A processor has no streams to capture."""
    return NativeGraphs()
