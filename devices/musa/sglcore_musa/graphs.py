"""Factories of the graph backends of a Moore Threads GPU (`full`, `breakable`, `piecewise`), with
MUSA graphs. torch has no compiler for this device."""

from __future__ import annotations

from sglcore.runtime.graphs.stream_graphs import stream_graphs
from sglcore.runtime.graphs.torch_capture import TorchCapture
from sglcore_musa.vendor import musa


def make_capture() -> TorchCapture:
    """Return a new capture that makes graphs with torch_musa's classes. It captures nothing yet."""
    return TorchCapture(musa().MUSAGraph, musa().graph_pool_handle)


full, breakable, piecewise = stream_graphs(make_capture)
