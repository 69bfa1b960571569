"""Every kind of graph over one way to capture a stream: what a device with stream capture offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from sglcore.device.facts import Facts
from sglcore.runtime.graphs.backend import GraphBackend
from sglcore.runtime.graphs.breakable import BreakableGraphs
from sglcore.runtime.graphs.capture import StreamCapture
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.piecewise import PiecewiseGraphs, as_traced, inductor
from sglcore.runtime.streams import Streams

GraphFactory: TypeAlias = Callable[[Facts, Streams], GraphBackend]
"""What `DevicePackage.graphs` names."""


def stream_graphs(
    make_capture: Callable[[], StreamCapture], *, compiles: bool = False
) -> tuple[GraphFactory, GraphFactory, GraphFactory]:
    """The factories of full, breakable and piecewise graphs. `compiles`: torch has a compiler for the device, which piecewise
    graphs use unless kernels are interpreted; where it has none, their pieces are as they were traced."""

    def full(facts: Facts, streams: Streams) -> GraphBackend:
        """Decode graphs."""
        return FullGraphs(make_capture(), streams)

    def breakable(facts: Facts, streams: Streams) -> GraphBackend:
        """Decode graphs, and prefill graphs between which attention runs eagerly."""
        return BreakableGraphs(make_capture(), streams)

    def piecewise(facts: Facts, streams: Streams) -> GraphBackend:
        """Decode graphs, and prefill traced as one graph and split at attention."""
        return PiecewiseGraphs(make_capture(), streams, inductor if compiles and not _interpreted() else as_traced)

    return full, breakable, piecewise


def _interpreted() -> bool:
    from sglcore.runtime.kernels.triton.rounding import INTERPRETED

    return INTERPRETED.value
