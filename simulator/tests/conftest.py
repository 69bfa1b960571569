"""Fixtures: the simulated device of this process, streams, and graphs with one interface for every
kind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import sglcore_sim
from sglcore_sim import Simulator


@pytest.fixture(scope="session")
def device_of_process() -> Simulator:
    """The device that `pytest --sim=KIND` installed, or one of the kind in SGLSIM."""
    gc.freeze()  # exclude what pytest and torch have loaded from garbage collection
    present = sglcore_sim.current()
    if present:
        return present
    kind = os.environ.get("SGLSIM")
    if not kind:
        pytest.skip("needs a simulated device: run with --sim=KIND")
    return sglcore_sim.install(kind, devices=2, memory=1 << 30)


@pytest.fixture
def sim(device_of_process: Simulator) -> Iterator[Simulator]:
    gc.collect()
    device_of_process.reset()
    torch.accelerator.set_device_index(0)
    yield device_of_process
    unexpected = [str(fault) for fault in device_of_process.faults]
    device_of_process.reset()
    assert not unexpected, unexpected


@pytest.fixture
def dev(sim: Simulator) -> torch.device:
    return sim.device()


@pytest.fixture
def side(dev: torch.device) -> torch.Stream:
    """A new stream without queued work."""
    return torch.Stream(dev)


class Recorded:
    """A captured graph with the same interface for every kind."""

    def __init__(self, sim: Simulator) -> None:
        self.neutral = "neutral_graph" in sim.kind.capabilities
        self.made: Any = None

    def capture(self, step: Callable[[], object], stream: torch.Stream, pool: tuple[int, int] | None = None) -> object:
        """Capture `step` on `stream`, after the current stream's work; return its result."""
        stream.wait_stream(torch.accelerator.current_stream())
        accelerator: Any = torch.accelerator
        graph: Any = accelerator.Graph(pool=pool) if self.neutral else torch.cuda.CUDAGraph()
        with stream:
            graph.capture_begin() if self.neutral else graph.capture_begin(pool=pool)
            self.made = graph
            try:
                result = step()
            except BaseException:
                graph.reset()
                raise
            graph.capture_end()
        return result

    def replay(self) -> None:
        self.made.replay()

    def pool(self) -> tuple[int, int]:
        return self.made.pool()

    def reset(self) -> None:
        self.made.reset()


@pytest.fixture
def make_graph(sim: Simulator) -> Iterator[Callable[[], Recorded]]:
    graphs: list[Recorded] = []

    def make() -> Recorded:
        graphs.append(Recorded(sim))
        return graphs[-1]

    yield make
    for graph in graphs:
        if graph.made:
            graph.reset()
