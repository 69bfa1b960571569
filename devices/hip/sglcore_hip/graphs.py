"""Factories of the graph backends of an AMD GPU (`full`, `breakable`, `piecewise`), with hipGraphs
through torch's `torch.cuda` names."""

from __future__ import annotations

import torch

from sglcore.runtime.graphs.stream_graphs import stream_graphs
from sglcore.runtime.graphs.torch_capture import TorchCapture


def make_capture() -> TorchCapture:
    """Return a new capture that makes graphs with torch's classes, which are named `cuda` on AMD
    GPUs too. It captures nothing yet."""
    return TorchCapture(torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle)


full, breakable, piecewise = stream_graphs(make_capture, compiles=True)
