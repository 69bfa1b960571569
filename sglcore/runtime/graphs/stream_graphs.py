"""`stream_graphs` makes the factories of full, breakable and piecewise graphs for
`DevicePackage.graphs`, for a device with stream capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from sglcore.device.facts import Facts
from sglcore.runtime.graphs.breakable import BreakableGraphs
from sglcore.runtime.graphs.capture import StreamCapture
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.graph_backend import GraphBackend
from sglcore.runtime.graphs.piecewise import PiecewiseGraphs, as_traced, inductor
from sglcore.runtime.streams import Streams

GraphFactory: TypeAlias = Callable[[Facts, Streams], GraphBackend]
"""The type of the entries of `DevicePackage.graphs`."""


def stream_graphs(
    make_capture: Callable[[], StreamCapture], *, compiles: bool = False
) -> tuple[GraphFactory, GraphFactory, GraphFactory]:
    """Return the factories of full, breakable and piecewise graphs.

    `compiles`: torch has a compiler for the device. Piecewise graphs use it, except with
    interpreted kernels; without a compiler, pieces run as traced.
    """

    def full(facts: Facts, streams: Streams) -> GraphBackend:
        """Return a backend of decode graphs; prefill is not captured."""
        return FullGraphs(make_capture(), streams)

    def breakable(facts: Facts, streams: Streams) -> GraphBackend:
        """Return a backend of decode graphs, and of segmented prefill graphs with eager attention
        between.
        """
        return BreakableGraphs(make_capture(), streams)

    def piecewise(facts: Facts, streams: Streams) -> GraphBackend:
        """Return a backend of decode graphs, and of prefill graphs traced as one graph and split at
        attention.
        """
        return PiecewiseGraphs(make_capture(), streams, inductor if compiles and not _interpreted() else as_traced)

    return full, breakable, piecewise


def _interpreted() -> bool:
    from sglcore.runtime.kernels.triton.rounding import INTERPRETED

    return INTERPRETED.value
