"""CUDA graphs: the stream capture that the core's graph backends drive."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from sglcore.device.facts import Facts
from sglcore.runtime.graphs.backend import GraphBackend
from sglcore.runtime.graphs.breakable import BreakableGraphs
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.piecewise import PiecewiseGraphs, as_traced, inductor
from sglcore.runtime.streams import Streams


class CudaSegment:
    """One captured graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self, update: object | None = None) -> None:
        """Queue it on the current stream. A CUDA graph takes no update."""
        assert update is None
        self._graph.replay()

    def reset(self) -> None:
        """Free it; its memory goes back to the pool."""
        self._graph.reset()


class CudaCapture:
    """Captures what a step queues on a stream; other threads may go on using the device."""

    def make_pool(self) -> object:
        """A pool of torch's allocator that graphs share."""
        return torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], None], stream: torch.Stream, pool: Any) -> CudaSegment:
        """Record the work that `step` queues; raises what the step or the driver raised."""
        graph = torch.cuda.CUDAGraph()
        with stream:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                step()
            except BaseException:
                # The driver gave up the capture too; what the step raised says why.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return CudaSegment(graph)


def full(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs."""
    return FullGraphs(CudaCapture(), streams)


def breakable(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs, and prefill graphs between which attention runs eagerly."""
    return BreakableGraphs(CudaCapture(), streams)


def piecewise(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs, and compiled prefill that is split at attention; not compiled where kernels are interpreted."""
    from sglcore.runtime.kernels.triton.rounding import INTERPRETED

    return PiecewiseGraphs(CudaCapture(), streams, as_traced if INTERPRETED.value else inductor)
