"""How acme captures what is queued on a stream. The core makes decode and prefill graphs of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglcore.device.facts import Facts
from sglcore.runtime.graphs.backend import GraphBackend
from sglcore.runtime.graphs.breakable import BreakableGraphs
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.streams import Streams


class Segment:
    """One captured graph."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self, update: object | None = None) -> None:
        """Queue it on the current stream."""
        assert update is None
        self._graph.replay()

    def reset(self) -> None:
        """Free it."""
        self._graph.reset()


class Pool:
    """Memory that graphs share: that of the first one that was captured."""

    id: tuple[int, int] | None = None


class Capture:
    """Through torch's own graph of an accelerator; where the extension has only its own, through that."""

    def make_pool(self) -> Pool:
        """Nothing yet."""
        return Pool()

    @contextmanager
    def capture(self, stream: torch.Stream, pool: Any) -> Iterator[Segment]:
        """Record the work that the block queues."""
        graph = torch.accelerator.Graph(pool=pool.id, capture_error_mode="thread_local")
        with stream:
            graph.capture_begin()
            yield Segment(graph)
            graph.capture_end()
        pool.id = graph.pool()


def full(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs."""
    return FullGraphs(Capture(), streams)


def breakable(facts: Facts, streams: Streams) -> GraphBackend:
    """Decode graphs, and prefill graphs between which attention runs eagerly."""
    return BreakableGraphs(Capture(), streams)
