"""Factories of the graph backends of an Ascend NPU (`full`, `breakable`, `piecewise`), with NPU
graphs, and the host's update of attention lengths at replay. torch has no compiler for this
device."""

from __future__ import annotations

from typing import Any

from sglcore.runtime.graphs.stream_graphs import stream_graphs
from sglcore.runtime.graphs.torch_capture import TorchCapture
from sglcore_npu.tasks import HostLengths, npu


class NpuSegment:
    """One captured graph. Its attention calls wait on the device until the host has set their
    lengths."""

    def __init__(self, graph: Any, updates: Any) -> None:
        self._graph = graph
        self._updates = updates
        self._done: Any = None

    def replay(self, update: object | None = None) -> None:
        """Queue the update of lengths on the update stream, and the graph on the current stream;
        does not wait. `update` is a `HostLengths` of this graph's tasks; None: the graph has no
        attention calls."""
        if update is None:
            self._graph.replay()
            return
        assert isinstance(update, HostLengths)
        # The previous run must have ended: the same tasks are rewritten, the same events recorded.
        if self._done is not None:
            self._updates.wait_event(self._done)
        update.apply(self._updates)
        self._graph.replay()
        self._done = npu().Event()
        self._done.record(npu().current_stream())

    def reset(self) -> None:
        """Free the graph; its memory returns to the pool. It can not be replayed afterwards."""
        self._graph.reset()


def make_capture() -> TorchCapture:
    """Return a new capture that makes graphs with torch_npu's classes, and a stream on which
    attention lengths are updated. It captures nothing yet."""
    updates = npu().Stream()
    return TorchCapture(npu().NPUGraph, npu().graph_pool_handle, lambda graph: NpuSegment(graph, updates))


full, breakable, piecewise = stream_graphs(make_capture)
