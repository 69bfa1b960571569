"""How third captures what is queued on a stream. The core makes decode and prefill graphs of it.

An extension without a graph class of its own may serve torch's: then `stream_graphs(AcceleratorCapture)`.
"""

from __future__ import annotations

from sglcore.runtime.graphs.stream_graphs import stream_graphs
from sglcore.runtime.graphs.torch_capture import TorchCapture
from sglcore_third.vendor import device_module


def make_capture() -> TorchCapture:
    """By the names of its module; `error_mode=None` where a capture takes none."""
    module = device_module()
    return TorchCapture(module.THIRDGraph, module.graph_pool_handle)


full, breakable, piecewise = stream_graphs(make_capture)
"""`compiles=True` where torch.compile compiles for it."""
