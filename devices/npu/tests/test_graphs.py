"""The package's stream capture, and the lengths that the host rewrites: stale, unordered or missing
lengths are detected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.attention.contract import Bucket
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.worker.schedule_batch import ForwardMode
from sglcore_npu.attention_fused import FusedAttention, FusedPlan
from sglcore_npu.graphs import NpuSegment, make_capture
from sglcore_npu.tasks import HostLengths, Task, npu
from tests.attention import on_device
from tests.attention.on_device import Placed, place
from tests.attention.rows import Heads

DEVICE, PAGE, SIZE = "npu:0", 128, 4
HEADS = Heads(4, 2, 64)
ROWS = [[(3, 1), (0, 1), (30, 1), (16, 1)], [(40, 1)], [(1, 1), (47, 1), (15, 1)], [(31, 1), (32, 1), (2, 1), (8, 1)]]


class Decode:
    """A captured decode bucket with static buffers, as in a runner."""

    def __init__(self, first: Placed) -> None:
        layer, dtype = first.case.layer, first.dtype
        assert isinstance(first.backend, FusedAttention)
        self.backend, self.stream, self.outs = first.backend, torch.Stream(torch.device(DEVICE)), []
        self.plan: FusedPlan = self.backend.capture_plan(Bucket(SIZE, SIZE))
        widths = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        self.inputs = [torch.zeros(SIZE, n * layer.head_dim, dtype=dtype, device=DEVICE) for n in widths]
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=SIZE,
            num_tokens=SIZE,
            req_pool_indices=torch.zeros(SIZE, dtype=torch.int32, device=DEVICE),
            seq_lens=torch.ones(SIZE, dtype=torch.int32, device=DEVICE),
            seq_lens_cpu=np.ones(SIZE, np.int32),
            out_cache_loc=torch.zeros(SIZE, dtype=torch.int32, device=DEVICE),
        )
        self.batch.mark_forward_metadata_ready(self.plan)

        def step() -> None:
            q, k, v = self.inputs
            self.outs.append(self.backend.forward(q, k, v, layer, self.batch))

        step()
        torch.accelerator.synchronize()
        self.segment = captured(step, self.stream)

    def refresh(self, placed: Placed) -> HostLengths:
        """Fill the buffers with a case over the same pools, and refresh the plan, on the replay's
        stream."""
        given = placed.batch
        with self.stream:
            for name, idle in (("req_pool_indices", 0), ("seq_lens", 1), ("out_cache_loc", 0)):
                buffer = getattr(self.batch, name)
                buffer.fill_(idle)
                buffer[: given.batch_size].copy_(getattr(given, name))
            for buffer, value in zip(self.inputs, placed.inputs, strict=True):
                buffer[: given.batch_size].copy_(value)
            self.batch.seq_lens_cpu = given.seq_lens_cpu
            return self.backend.refresh(self.plan, self.batch)

    def replay(self, update: HostLengths) -> None:
        """Replay on the runner's stream."""
        with self.stream:
            self.segment.replay(update)

    def result(self, count: int) -> Tensor:
        """float32 of the real rows, on the host."""
        self.stream.synchronize()
        return self.outs[-1][:count].cpu().float()


SIMULATED = pytest.mark.needs("simulator")


@pytest.fixture
def sim() -> Any:
    """The simulated device of this process."""
    from sglcore_sim import current

    return current()


@pytest.fixture
def first() -> Iterator[Placed]:
    yield place(ROWS[0], FusedAttention, HEADS, DEVICE, page_size=PAGE, decode=True)


def over_the_same_pools(first: Placed, seed: int) -> Placed:
    """Make another case over the pools that the graph reads."""
    other = on_device.over_the_same_pools(first, ROWS[seed], HEADS, seed)
    torch.accelerator.synchronize()
    return other


def test_a_captured_bucket_serves_other_lengths_pages_and_fewer_rows(first: Placed) -> None:
    graph = Decode(first)
    graph.replay(graph.refresh(first))
    first.check(graph.result(SIZE))
    for seed in range(1, len(ROWS)):
        other = over_the_same_pools(first, seed)
        graph.replay(graph.refresh(other))
        other.check(graph.result(len(ROWS[seed])))


@SIMULATED
def test_replays_follow_each_other_without_a_wait_of_the_host(first: Placed, sim: Any) -> None:
    graph = Decode(first)
    update = graph.refresh(first)
    with sim.no_sync():
        for _ in range(3):
            graph.replay(update)
    first.check(graph.result(SIZE))


def test_lengths_that_were_not_rewritten_are_found_by_the_oracle(first: Placed) -> None:
    graph = Decode(first)
    graph.replay(graph.refresh(first))
    graph.result(SIZE)
    other = over_the_same_pools(first, 3)
    stale = HostLengths(graph.plan.tasks, [len(keys) for keys in first.case.keys])
    graph.refresh(other)
    graph.replay(stale)
    with pytest.raises(AssertionError):
        other.check(graph.result(SIZE))


@SIMULATED
def test_a_rewriting_that_does_not_wait_for_the_last_run_is_a_race(
    first: Placed, sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Decode(first)
    update = graph.refresh(first)
    graph.replay(update)
    monkeypatch.setattr(graph.segment, "_done", None)
    with sim.expect("race") as caught:
        graph.replay(update)
    assert "graph_task_update" in caught.text
    sim.reset()


@SIMULATED
def test_a_replay_without_its_update_would_hang_and_is_caught(first: Placed, sim: Any) -> None:
    graph = Decode(first)
    graph.refresh(first)
    with graph.stream:
        graph.segment.replay(None)
    with sim.expect("stuck_graph"):
        npu().synchronize()


@SIMULATED
def test_an_update_that_fails_is_raised_and_lets_no_later_run_pass_on_its_events(first: Placed, sim: Any) -> None:
    graph = Decode(first)
    update = graph.refresh(first)
    (task,) = update.tasks
    broken = Task(task.handle, npu().ExternalEvent(), {**task.call, "unknown": 1})
    with pytest.raises(RuntimeError, match="unknown"):
        graph.replay(HostLengths([task, broken], update.lengths))
    with graph.stream:
        graph.segment.replay(None)
    with sim.expect("stuck_graph"):
        npu().synchronize()
    graph.replay(update)
    first.check(graph.result(SIZE))


def captured(step: Callable[[], object], stream: torch.Stream) -> NpuSegment:
    """Capture one segment in a new pool."""
    capture = make_capture()
    torch.accelerator.synchronize()
    with capture.capture(stream, capture.make_pool()) as segment:
        step()
    assert isinstance(segment, NpuSegment)
    return segment
