"""Captures by torch's graph classes: begun with the arguments that each class takes, into one pool,
and ended on every way out; each planted defect is caught by one of these tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch

from ci.lanes import Lane
from sglcore.runtime.graphs import torch_capture
from sglcore.runtime.graphs.capture import StreamCapture
from sglcore.runtime.graphs.torch_capture import AcceleratorCapture, TorchCapture

KIB = 1 << 10
BLOCK = 512 * KIB
DEVICE = pytest.mark.needs("simulator", "graphs.full")


@pytest.fixture(params=["own", pytest.param("neutral", marks=pytest.mark.sim("neutral_graph"))])
def make_capture(request: pytest.FixtureRequest, lane: Lane) -> Callable[[], StreamCapture]:
    """The capture of the device package, and torch's `accelerator.Graph` where the device has
    one."""
    if request.param == "neutral":
        return AcceleratorCapture
    return import_module(f"sglcore_{lane.device}.graphs").make_capture


def check_pool(sim: Any, capture: StreamCapture) -> None:
    """Check that later segments with the same temporary memory reuse the pool."""
    stream, pool, x = torch.Stream(sim.device()), capture.make_pool(), torch.ones(BLOCK, device=sim.device())
    torch.accelerator.empty_cache()
    reserved, segments = [], []
    for _ in range(3):
        with capture.capture(stream, pool) as segment:
            x.copy_(x + 1)
        segments.append(segment)
        reserved.append(torch.accelerator.memory_reserved())
    for segment in segments:
        segment.replay()
    torch.accelerator.synchronize()
    assert x[0].item() == 4.0
    for segment in segments:
        segment.reset()
    assert reserved[1] == reserved[2], "the last segment has a pool of its own"


def check_failure(sim: Any, capture: StreamCapture) -> None:
    """Check that an exception in the block is raised, and that the next capture on the stream, into
    a new pool, works."""
    stream, pool, x = torch.Stream(sim.device()), capture.make_pool(), torch.ones(4, device=sim.device())
    torch.accelerator.synchronize()
    with pytest.raises(LookupError, match="in the block"), capture.capture(stream, pool):
        x.add_(1)
        raise LookupError("in the block")
    with capture.capture(stream, capture.make_pool()) as segment:
        x.add_(1)
    segment.replay()
    torch.accelerator.synchronize()
    assert x.tolist() == [2.0] * 4
    segment.reset()


@DEVICE
def test_segments_of_one_pool_use_its_memory_in_turn(sim: Any, make_capture: Callable[[], StreamCapture]) -> None:
    check_pool(sim, make_capture())


@DEVICE
def test_a_block_that_raises_ends_its_capture(sim: Any, make_capture: Callable[[], StreamCapture]) -> None:
    check_failure(sim, make_capture())


@DEVICE
def test_planted_defects_of_a_capture_are_caught(
    sim: Any, make_capture: Callable[[], StreamCapture], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = make_capture()
    real = made.capture
    monkeypatch.setattr(made, "capture", lambda stream, pool: real(stream, made.make_pool()))
    with pytest.raises(AssertionError, match="a pool of its own"):
        check_pool(sim, made)
    monkeypatch.setattr(torch_capture, "entered", lambda stream: nullcontext())
    with sim.expect("wrong_capture"):
        check_failure(sim, make_capture())
    monkeypatch.undo()
    alive: list[Any] = []

    @contextmanager
    def left_open(graph: Any) -> Iterator[None]:
        alive.append(graph)
        yield
        graph.capture_end()

    monkeypatch.setattr(torch_capture, "_begun", left_open)
    with sim.expect("wrong_capture"):
        check_failure(sim, make_capture())
    alive[0].reset()


@pytest.mark.parametrize("graph", [torch.cuda.CUDAGraph, torch.xpu.XPUGraph])
def test_a_capture_begins_as_the_class_of_its_graph_takes_it(graph: Any) -> None:
    takes = inspect.signature(graph.capture_begin)
    begun: list[inspect.BoundArguments] = []

    class Graph:
        def capture_begin(self, *args: Any, **named: Any) -> None:
            begun.append(takes.bind(self, *args, **named))

        def capture_end(self) -> None: ...

    knows_modes = "capture_error_mode" in takes.parameters
    fitting = TorchCapture(Graph, object) if knows_modes else TorchCapture(Graph, object, error_mode=None)
    current: Any = nullcontext()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_capture, "entered", lambda stream: nullcontext())
        with fitting.capture(current, (0, 7)):
            assert begun[0].arguments["pool"] == (0, 7)
        assert not knows_modes or begun[0].arguments["capture_error_mode"] == torch_capture.ERRORS
        if not knows_modes:
            with (
                pytest.raises(TypeError, match="capture_error_mode"),
                TorchCapture(Graph, object).capture(current, None),
            ):
                pass
