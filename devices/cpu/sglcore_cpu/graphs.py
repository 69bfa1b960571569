"""Graphs by torch's compiler: one compiled callable for each bucket (batch size). Attention stays
one opaque call inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglcore.device.facts import Facts
from sglcore.runtime.streams import Streams


class CompiledStep:
    """The `CapturedStep` of one bucket: a forward compiled for its exact shapes. Making it compiles
    and runs the step once, which takes seconds."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        # The shapes of a bucket never change, so no guards are needed. With guards, a change of
        # process-wide state by other code (such as torch's thread count) would recompile the step
        # while requests wait.
        self._step = torch.compile(  # pyright: ignore[reportCallIssue]  the overloads lack isolate_recompiles
            step, fullgraph=True, dynamic=False, isolate_recompiles=True, options={"guard_filter_fn": _no_guards}
        )
        self._step()

    def replay(self, update: object | None) -> Tensor:
        """Run the step on the current contents of its buffers; return its output. `update` is not
        used: the compiled step has nothing to update."""
        return self._step()


def _no_guards(guards: Sequence[object]) -> list[bool]:
    return [False] * len(guards)


class CompiledGraphs:
    """The `GraphBackend` that compiles steps with torch.compile. torch needs a C++ compiler on the
    machine; this class does not check it."""

    kind = "compiled"

    def capture(self, step: Callable[[], Tensor]) -> CompiledStep:
        """Compile the step and run it once, so that nothing is compiled while requests wait. Takes
        seconds."""
        return CompiledStep(step)

    def close(self) -> None:
        """Do nothing: steps share no resources."""


def compiled(facts: Facts, streams: Streams) -> CompiledGraphs:
    """Make the graphs of kind `compiled`; a processor has no streams, so `streams` is not used."""
    return CompiledGraphs()
