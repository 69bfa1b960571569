"""NPU graphs: the stream capture that the core's graph backends drive, and the host's update of attention at replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from sglcore.device.facts import Facts
from sglcore.runtime.graphs.backend import GraphBackend
from sglcore.runtime.graphs.breakable import BreakableGraphs
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.streams import Streams
from sglcore_npu.tasks import HostLengths, npu


class NpuSegment:
    """One captured graph. Its attention calls wait, inside the graph, for the host to tell them their lengths."""

    def __init__(self, graph: Any, updates: Any) -> None:
        self._graph = graph
        self._updates = updates
        self._done: Any = None

    def replay(self, update: object | None = None) -> None:
        """Queue the new lengths on the stream of updates and, beside it, the graph on the current stream."""
        if update is None:
            self._graph.replay()
            return
        assert isinstance(update, HostLengths)
        # The run before must have spent its own lengths: the same tasks are rewritten, the same events recorded again.
        if self._done is not None:
            self._updates.wait_event(self._done)
        update.apply(self._updates)
        self._graph.replay()
        self._done = npu().Event()
        self._done.record(npu().current_stream())

    def reset(self) -> None:
        """Free it; its memory goes back to the pool."""
        self._graph.reset()


class NpuCapture:
    """Captures what a step queues on a stream; other threads may go on using the device."""

    def __init__(self) -> None:
        self._updates = npu().Stream()

    def make_pool(self) -> object:
        """A pool of the extension's allocator that graphs share."""
        return npu().graph_pool_handle()

    def capture(self, step: Callable[[], None], stream: torch.Stream, pool: Any) -> NpuSegment:
        """Record the work that `step` queues; raises what the step or the driver raised."""
        graph = npu().NPUGraph()
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
        return NpuSegment(graph, self._updates)


def full(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs."""
    return FullGraphs(NpuCapture(), streams)


def breakable(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs, and prefill graphs between which attention runs eagerly."""
    return BreakableGraphs(NpuCapture(), streams)
