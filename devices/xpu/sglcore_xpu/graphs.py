"""Factories of the graph backends of an Intel GPU (`full`, `breakable`, `piecewise`), with SYCL
graphs through torch's classes. A capture ignores other threads' work on other queues, so it has no
error mode."""

from __future__ import annotations

import torch

from sglcore.runtime.graphs.stream_graphs import stream_graphs
from sglcore.runtime.graphs.torch_capture import TorchCapture


def make_capture() -> TorchCapture:
    """Return a new capture that makes graphs with torch's graph class for this device. It captures
    nothing yet."""
    return TorchCapture(torch.xpu.XPUGraph, torch.xpu.graph_pool_handle, error_mode=None)


full, breakable, piecewise = stream_graphs(make_capture, compiles=True)
