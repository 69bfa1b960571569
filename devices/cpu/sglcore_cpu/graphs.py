"""The processor's graph: one compiled callable per bucket. Attention stays one opaque call inside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class CompiledStep:
    """A forward of one bucket, compiled for its exact shapes."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self._step = torch.compile(step, fullgraph=True, dynamic=False)
        self._step()

    def replay(self, update: object | None) -> Tensor:
        """Run on what the buffers hold."""
        return self._step()


class CompiledGraphs:
    """Compiles through torch's own compiler; needs a C++ compiler on the machine."""

    kind = "compiled"

    def capture(self, step: Callable[[], Tensor]) -> CompiledStep:
        """Compile and run once. Takes seconds."""
        return CompiledStep(step)

    def close(self) -> None:
        """Nothing is shared between steps."""
