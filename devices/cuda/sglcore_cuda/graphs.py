"""CUDA graphs."""

from __future__ import annotations

import torch

from sglcore.device.facts import Facts
from sglcore.runtime.graphs.backend import GraphBackend
from sglcore.runtime.graphs.breakable import BreakableGraphs
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.piecewise import PiecewiseGraphs, as_traced, inductor
from sglcore.runtime.graphs.torch_capture import TorchCapture
from sglcore.runtime.streams import Streams


def make_capture() -> TorchCapture:
    """Through torch's own names."""
    return TorchCapture(torch.cuda.CUDAGraph, torch.cuda.graph_pool_handle)


def full(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs."""
    return FullGraphs(make_capture(), streams)


def breakable(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs, and prefill graphs between which attention runs eagerly."""
    return BreakableGraphs(make_capture(), streams)


def piecewise(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs, and compiled prefill that is split at attention; not compiled where kernels are interpreted."""
    from sglcore.runtime.kernels.triton.rounding import INTERPRETED

    return PiecewiseGraphs(make_capture(), streams, as_traced if INTERPRETED.value else inductor)
