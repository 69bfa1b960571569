"""NPU graphs, and the host's update of attention at replay. No compiler for this device ships with
torch."""

from __future__ import annotations

from typing import Any

from sglcore.runtime.graphs.stream_graphs import stream_graphs
from sglcore.runtime.graphs.torch_capture import TorchCapture
from sglcore_npu.tasks import HostLengths, npu


class NpuSegment:
    """One captured graph. Its attention calls wait, inside the graph, for the host to tell them
    their lengths."""

    def __init__(self, graph: Any, updates: Any) -> None:
        self._graph = graph
        self._updates = updates
        self._done: Any = None

    def replay(self, update: object | None = None) -> None:
        """Queue the new lengths on the update stream and the graph on the current stream."""
        if update is None:
            self._graph.replay()
            return
        assert isinstance(update, HostLengths)
        # The run before must have spent its own lengths: the same tasks are rewritten, the same
        # events recorded again.
        if self._done is not None:
            self._updates.wait_event(self._done)
        update.apply(self._updates)
        self._graph.replay()
        self._done = npu().Event()
        self._done.record(npu().current_stream())

    def reset(self) -> None:
        """Free it; its memory goes back to the pool."""
        self._graph.reset()


def make_capture() -> TorchCapture:
    """Through the extension's names, with a stream for updates."""
    updates = npu().Stream()
    return TorchCapture(npu().NPUGraph, npu().graph_pool_handle, lambda graph: NpuSegment(graph, updates))


full, breakable, piecewise = stream_graphs(make_capture)
