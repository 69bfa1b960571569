"""Stream capture with a graph class like torch's own, with `capture_begin`, `capture_end`, `replay`
and `reset`.

A device with such a class in its torch module provides only the class and the handle of the pool.
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
"""Only operations of this thread can invalidate its capture."""


class GraphSegment:
    """The `Segment` of one captured graph that takes no update."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self, update: HostUpdate | None = None) -> None:
        """Implements `Segment.replay`: queue the graph on the current stream. `update` must be
        None.
        """
        assert update is None, "this graph takes no update"
        self._graph.replay()

    def reset(self) -> None:
        """Free the graph; its memory goes back to the pool."""
        self._graph.reset()


class TorchCapture:
    """The `StreamCapture` of a graph class like torch's; other threads may use the device during a
    capture.

    `error_mode`: the `capture_error_mode` of `capture_begin`; None: these graphs have no such
    parameter.
    """

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
        """Implements `StreamCapture.capture`; raises what the block or the driver raises."""
        graph = self._make_graph()
        with entered(stream):
            graph.capture_begin(pool=pool, **self._options)
            with _begun(graph):
                yield self._make_segment(graph)


class Pool:
    """The memory of torch's accelerator graphs, made by `AcceleratorCapture.make_pool`. `id` is the
    pool id of the first captured graph; None before it.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id: tuple[int, int] | None = None


class AcceleratorCapture:
    """The `StreamCapture` of torch's device-independent graph class (torch 2.12 and later)."""

    def make_pool(self) -> Pool:
        """Return a new, empty pool."""
        return Pool()

    @contextmanager
    def capture(self, stream: torch.Stream, pool: Any) -> Iterator[Segment]:
        """Implements `StreamCapture.capture`; raises what the block or the driver raises."""
        accelerator: Any = torch.accelerator  # older torch lacks it; then this class is not chosen
        graph = accelerator.Graph(pool=pool.id, capture_error_mode=ERRORS)
        with entered(stream):
            graph.capture_begin()
            with _begun(graph):
                yield GraphSegment(graph)
        pool.id = graph.pool()


@contextmanager
def _begun(graph: Any) -> Iterator[None]:
    """Context manager: end a capture that has begun when the block ends. After an exception of the
    block errors of the end are dropped, and the exception is raised again.
    """
    try:
        yield
    except BaseException:
        # The driver has dropped the capture too; the exception of the block gives the cause.
        with suppress(RuntimeError):
            graph.capture_end()
        raise
    graph.capture_end()
