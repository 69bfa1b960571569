"""MUSA graphs."""

from __future__ import annotations

from sglcore.device.facts import Facts
from sglcore.runtime.graphs.backend import GraphBackend
from sglcore.runtime.graphs.breakable import BreakableGraphs
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.piecewise import PiecewiseGraphs, as_traced
from sglcore.runtime.graphs.torch_capture import TorchCapture
from sglcore.runtime.streams import Streams
from sglcore_musa.vendor import musa


def make_capture() -> TorchCapture:
    """Through the extension's names."""
    return TorchCapture(musa().MUSAGraph, musa().graph_pool_handle)


def full(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs."""
    return FullGraphs(make_capture(), streams)


def breakable(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs, and prefill graphs between which attention runs eagerly."""
    return BreakableGraphs(make_capture(), streams)


def piecewise(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs, and prefill traced as one graph and split at attention. No compiler for this device ships with torch."""
    return PiecewiseGraphs(make_capture(), streams, as_traced)
