"""A stream capture without a device: records torch's operations with their tensors, and runs them
again on the same memory.

As on hardware, a capture computes nothing: its results are overwritten with poison until the first
replay.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglcore.device.facts import Facts
from sglcore.runtime.attention.contract import AttentionBackend, HostUpdate
from sglcore.runtime.attention.gathered import GatheredAttention
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.forward_context import ForwardContext
from sglcore.runtime.graph_runner import GraphRunner
from sglcore.runtime.graphs.breakable import BreakableGraphs
from sglcore.runtime.graphs.full import FullGraphs
from sglcore.runtime.graphs.piecewise import PiecewiseGraphs, as_traced
from sglcore.runtime.graphs.prefill_graphs import PromptForward
from sglcore.runtime.registry_builders import build_prefill_registry
from sglcore.runtime.streams import Streams
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.runtime.tiny import SHARED, SLOTS, Site, TinyModel, make_site

SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "item", "is_nonzero", "equal", "pin_memory")


class Queue:
    """The forward stream of a device without streams: knows whether it is the current one."""

    def __init__(self) -> None:
        self.depth = 0
        self.synchronized = 0
        self.device = torch.device("cpu")

    def __enter__(self) -> Queue:
        self.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def synchronize(self) -> None:
        """Do nothing: no work is asynchronous."""
        self.synchronized += 1


def make_streams() -> Streams:
    """Streams of the recording device."""
    return Streams(None, Queue())  # pyright: ignore[reportArgumentType]


@dataclass
class Op:
    """One recorded operation: its arguments, and which of its results own their memory."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: list[Tensor | None]

    def run(self) -> None:
        """Call it again and write its results into the memory of the first call."""
        found = tree_leaves(self.function(*self.args, **self.kwargs))
        for value, kept in zip(found, self.fresh, strict=True):
            if kept is not None:
                kept.copy_(value)


class Recording(TorchDispatchMode):
    """Records every operation; refuses operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in SYNCS:
            raise RuntimeError(f"{func} waits for the device inside a capture")
        result = func(*args, **kwargs)
        known = {value.untyped_storage().data_ptr() for value in tree_leaves((args, kwargs)) if _is_tensor(value)}
        leaves = tree_leaves(result)
        fresh = [
            leaf if _is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in known else None for leaf in leaves
        ]
        self.ops.append(Op(func, args, kwargs, fresh))
        return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


@dataclass
class RecordedSegment:
    """Operations in order. `updates`: the host updates passed to its replays."""

    ops: list[Op]
    capture: RecordingCapture
    updates: list[HostUpdate | None] = field(default_factory=list)
    is_reset: bool = False

    def replay(self, update: HostUpdate | None = None) -> None:
        """Run the operations."""
        assert not self.is_reset, "a graph that was freed is replayed"
        assert self.capture.queue is not None and self.capture.queue.depth, "a replay on the wrong stream"
        self.updates.append(update)
        for op in self.ops:
            op.run()

    def reset(self) -> None:
        """Free the operations."""
        self.is_reset = True
        self.ops.clear()


@dataclass
class RecordingCapture:
    """The device's part. `segments`: in order of capture; `pools`: number of pools made;
    `collects`: whether the garbage collector ran during a capture."""

    segments: list[RecordedSegment] = field(default_factory=list)
    pools: int = 0
    queue: Queue | None = None
    collects: bool = False

    def make_pool(self) -> object:
        """Return a number."""
        self.pools += 1
        return self.pools

    @contextmanager
    def capture(self, stream: torch.Stream, pool: object) -> Iterator[RecordedSegment]:
        """Record the operations, then overwrite the results with poison."""
        assert pool == self.pools
        assert isinstance(stream, Queue) and stream.depth, "a capture while another stream is current"
        self.queue = stream
        self.collects |= gc.isenabled()
        recording = Recording()
        segment = RecordedSegment(recording.ops, self)
        with recording:
            yield segment
        if not recording.ops:
            warnings.warn("The graph is empty", stacklevel=1)
        for op in recording.ops:
            for value in op.fresh:
                if value is not None:
                    value.fill_(
                        torch.nan if value.is_floating_point() else 1 << (0 if value.dtype is torch.bool else 6)
                    )
        self.segments.append(segment)


def make_backend(kind: str, capture: RecordingCapture, streams: Streams) -> FullGraphs:
    """The graph mechanism `kind` over the recording capture."""
    if kind == "piecewise":
        return PiecewiseGraphs(capture, streams, as_traced)
    return {"full": FullGraphs, "breakable": BreakableGraphs}[kind](capture, streams)


@dataclass
class GraphSite:
    """A site of the tiny model with steps captured by the recording device."""

    site: Site
    graphs: GraphRunner
    capture: RecordingCapture
    streams: Streams

    def run(self, batch: ScheduleBatch) -> tuple[Tensor, str]:
        """Run one step; return a copy of its hidden states, and its path."""
        with torch.inference_mode(), self.streams.running():
            hidden, path = self.site.runner.forward(self.site.runner.init_batch(batch))
            return hidden.clone(), path


def make_graph_site(
    kind: str = "full",
    model: TinyModel | None = None,
    *,
    buckets: tuple[int, ...] = (1, 2, 4, 6),
    tokens: tuple[int, ...] = (4, 6, 8, 12, 16, 24, 32),
    attention: type[AttentionBackend] = GatheredAttention,
    facts: Facts = SHARED,
    capture: RecordingCapture | None = None,
    poison: bool = False,
    max_bs: int = SLOTS,
    batch_type: type[ForwardBatch] = ForwardBatch,
    **options: Any,
) -> GraphSite:
    """A tiny model, its site and its captured graphs. `options` go to the graph runner."""
    capture, streams = capture or RecordingCapture(), make_streams()
    site = make_site(model, facts=facts, attention=attention, poison=poison, max_bs=max_bs, batch_type=batch_type)
    runner, model = site.runner, site.model
    prompts = None
    if kind != "full":
        runner.prefill_registry = build_prefill_registry(
            facts, site.table, max_bs=SLOTS, max_num_tokens=max(tokens), batch_type=batch_type
        )
        prompts = PromptForward(model, runner.prefill_registry, tokens)
    context = ForwardContext(site.attention, None, model.attention_layers)
    backend = make_backend(kind, capture, streams)
    graphs = GraphRunner(
        backend,
        runner.decode_registry,
        context,
        model,
        buckets,
        prompts=prompts,
        streams=streams,
        **options,
    )
    runner.graphs = graphs
    return GraphSite(site, graphs, capture, streams)
