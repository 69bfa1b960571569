"""SYCL graphs by torch's own names. What other threads do on other queues is no part of a capture,
so it takes no error mode."""

from __future__ import annotations

import torch

from sglcore.runtime.graphs.stream_graphs import stream_graphs
from sglcore.runtime.graphs.torch_capture import TorchCapture


def make_capture() -> TorchCapture:
    """A graph of torch's own for this device."""
    return TorchCapture(torch.xpu.XPUGraph, torch.xpu.graph_pool_handle, error_mode=None)


full, breakable, piecewise = stream_graphs(make_capture, compiles=True)
