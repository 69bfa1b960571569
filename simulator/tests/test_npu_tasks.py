"""Captured calls that the host rewrites: a replay waits for its update; missing stream order or a
missing event is a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch

PAGE, HEADS, DIM = 128, 2, 16

pytestmark = pytest.mark.sim("graph_update")


class Attention:
    """A captured attention call over one page, with lengths from the host."""

    def __init__(self, sim, waits=True) -> None:
        device = sim.device()
        self.npu: Any = torch.get_device_module(device)
        torch.manual_seed(0)
        made = torch.randn(1, 1, HEADS, DIM).half(), torch.randn(2, 1, PAGE, HEADS * DIM).half()
        self.q, (self.k, self.v) = made[0].to(device), made[1].to(device)
        self.out, self.lse = torch.empty_like(self.q), torch.empty(1, device=device)
        self.table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self.stream, self.updates = self.npu.Stream(), self.npu.Stream()
        self.graph, self.event = self.npu.NPUGraph(), self.npu.ExternalEvent()
        torch.accelerator.synchronize()
        with self.npu.stream(self.stream):
            self.graph.capture_begin()
            if waits:
                self.event.wait(self.stream)
                self.event.reset(self.stream)
            self.npu.graph_task_group_begin(self.stream)
            self.call([1])
            self.handle = self.npu.graph_task_group_end(self.stream)
            self.graph.capture_end()

    def call(self, lengths):
        torch.ops.npu.npu_fused_infer_attention_score.out(
            self.q,
            self.k,
            self.v,
            block_table=self.table,
            actual_seq_lengths_kv=lengths,
            num_heads=HEADS,
            num_key_value_heads=HEADS,
            scale=DIM**-0.5,
            input_layout="BSND",
            block_size=PAGE,
            out=[self.out, self.lse],
        )

    def update(self, lengths, record=True):
        with self.npu.stream(self.updates):
            self.npu.graph_task_update_begin(self.updates, self.handle)
            self.call(lengths)
            self.npu.graph_task_update_end(self.updates)
            if record:
                self.event.record(self.updates)

    def replay(self):
        with self.npu.stream(self.stream):
            self.graph.replay()

    def expected(self, length):
        shape = (PAGE, HEADS, DIM)
        q, k, v = self.q.cpu().float()[0, 0], self.k.cpu().float().view(shape), self.v.cpu().float().view(shape)
        scores = torch.einsum("hd,khd->hk", q, k[:length]) * DIM**-0.5
        return torch.einsum("hk,khd->hd", scores.softmax(-1), v[:length])


def test_a_replay_uses_the_lengths_of_its_own_update(sim) -> None:
    case = Attention(sim)
    for length in (3, 100, 7):
        case.updates.wait_stream(case.stream)
        case.replay()
        case.update([length])
        case.stream.synchronize()
        torch.testing.assert_close(case.out.cpu().float()[0, 0], case.expected(length), atol=2e-3, rtol=2e-3)
    assert sim.stats()["replays"] == 3


def test_an_update_that_does_not_wait_for_the_replay_before_is_a_race(sim) -> None:
    case = Attention(sim)
    case.replay()
    case.update([3])
    with sim.expect("race"):
        case.replay()
        case.update([4])
    case.event.record(case.updates)


def test_a_graph_that_does_not_wait_for_its_update_races_with_it(sim) -> None:
    case = Attention(sim, waits=False)
    case.replay()
    with sim.expect("race"):
        case.update([3])


def test_work_queued_between_a_replay_and_its_update_is_a_fault(sim) -> None:
    case = Attention(sim)
    case.replay()
    with case.stream:
        case.out.add_(1)
    with sim.expect("stuck_graph"):
        case.update([3])


def test_waiting_for_a_graph_whose_event_is_never_recorded_is_a_fault(sim) -> None:
    case = Attention(sim)
    case.replay()
    case.update([3], record=False)
    with sim.expect("stuck_graph"):
        case.stream.synchronize()


def test_an_event_that_is_recorded_before_the_update_as_well_as_after_it_is_a_race(sim) -> None:
    case = Attention(sim)
    with case.npu.stream(case.updates):
        case.event.record(case.updates)
    with sim.expect("race"):
        case.update([3])


def test_another_operator_in_an_update_is_refused(sim) -> None:
    case = Attention(sim)
    with case.npu.stream(case.updates):
        case.npu.graph_task_update_begin(case.updates, case.handle)
        with pytest.raises(RuntimeError, match="npu_swiglu"):
            torch.ops.npu.npu_swiglu(case.q)
        case.npu.graph_task_update_end(case.updates)


def test_an_update_that_calls_nothing_is_refused(sim) -> None:
    case = Attention(sim)
    case.npu.graph_task_update_begin(case.updates, case.handle)
    with pytest.raises(RuntimeError, match="0 of 1"):
        case.npu.graph_task_update_end(case.updates)
