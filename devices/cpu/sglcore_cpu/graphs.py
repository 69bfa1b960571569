"""The processor's graph: one compiled callable per bucket. Attention stays one opaque call inside
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglcore.device.facts import Facts
from sglcore.runtime.streams import Streams


class CompiledStep:
    """A forward of one bucket, compiled for its exact shapes."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        # A bucket never changes, so nothing is guarded: its code is found by its own entry, and
        # what another user of torch does to the process (threads, for one) recompiles nothing while
        # requests wait.
        self._step = torch.compile(  # pyright: ignore[reportCallIssue]  the overloads lack isolate_recompiles
            step, fullgraph=True, dynamic=False, isolate_recompiles=True, options={"guard_filter_fn": _no_guards}
        )
        self._step()

    def replay(self, update: object | None) -> Tensor:
        """Run on what the buffers hold."""
        return self._step()


def _no_guards(guards: Sequence[object]) -> list[bool]:
    return [False] * len(guards)


class CompiledGraphs:
    """Compiles through torch's own compiler; needs a C++ compiler on the machine."""

    kind = "compiled"

    def capture(self, step: Callable[[], Tensor]) -> CompiledStep:
        """Compile and run once. Takes seconds."""
        return CompiledStep(step)

    def close(self) -> None:
        """Nothing is shared between steps."""


def compiled(facts: Facts, streams: Streams) -> CompiledGraphs:
    """Decode steps by torch's compiler. A processor has no streams to capture."""
    return CompiledGraphs()
