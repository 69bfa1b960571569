"""Stream capture through a graph object with the names that torch gives its own: `capture_begin`, `capture_end`, `replay`,
`reset`. A device whose torch module has such a class brings the class and the pool's handle, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from sglcore.runtime.attention.contract import HostUpdate
from sglcore.runtime.graphs.capture import Segment
from sglcore.runtime.streams import entered

ERRORS = "thread_local"
"""Only what this thread does can break its capture."""


class GraphSegment:
    """One captured graph that takes no update."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self, update: HostUpdate | None = None) -> None:
        """Queue it on the current stream."""
        assert update is None, "this graph takes no update"
        self._graph.replay()

    def reset(self) -> None:
        """Free it; its memory goes back to the pool."""
        self._graph.reset()


class TorchCapture:
    """Captures what is queued on a stream; other threads may go on using the device. `error_mode`: what `capture_begin` takes
    for that; None: these graphs take none."""

    def __init__(
        self,
        make_graph: Callable[[], Any],
        make_pool: Callable[[], object],
        make_segment: Callable[[Any], Segment] = GraphSegment,
        error_mode: str | None = ERRORS,
    ) -> None:
        self._make_graph = make_graph
        self.make_pool = make_pool
        self._make_segment = make_segment
        self._options = {} if error_mode is None else {"capture_error_mode": error_mode}

    @contextmanager
    def capture(self, stream: torch.Stream, pool: Any) -> Iterator[Segment]:
        """Record the work that the block queues; raises what the block or the driver raised."""
        graph = self._make_graph()
        with entered(stream):
            graph.capture_begin(pool=pool, **self._options)
            with _begun(graph):
                yield self._make_segment(graph)


class Pool:
    """The memory of torch's own graphs of an accelerator: that of the first one that was captured."""

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id: tuple[int, int] | None = None


class AcceleratorCapture:
    """The same through torch's own graph of an accelerator, which some extensions serve (torch 2.12 and later)."""

    def make_pool(self) -> Pool:
        """Nothing yet."""
        return Pool()

    @contextmanager
    def capture(self, stream: torch.Stream, pool: Any) -> Iterator[Segment]:
        """Record the work that the block queues; raises what the block or the driver raised."""
        accelerator: Any = torch.accelerator  # an older torch, with which this is not chosen, has no such name
        graph = accelerator.Graph(pool=pool.id, capture_error_mode=ERRORS)
        with entered(stream):
            graph.capture_begin()
            with _begun(graph):
                yield GraphSegment(graph)
        pool.id = graph.pool()


@contextmanager
def _begun(graph: Any) -> Iterator[None]:
    """A capture that has begun; it ends with the block."""
    try:
        yield
    except BaseException:
        # The driver gave up the capture too; what the block raised says why.
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()
