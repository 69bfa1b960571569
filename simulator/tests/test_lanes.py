"""Triton's lanes: an address outside of every argument is a fault that names the kernel, the
program and the lanes; races are detected."""

# A kernel is not Python to a type checker.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import triton
import triton.language as tl

from sglcore_sim import Fault
from sglcore_sim.lanes import check_lanes


@triton.jit
def add_one(x, out, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (lane < n) | (not MASKED)
    tl.store(out + lane, tl.load(x + lane, mask=inside) + 1, mask=inside)


@triton.jit
def count_all(hits, places, BLOCK: tl.constexpr):
    place = tl.load(places + tl.arange(0, BLOCK))
    tl.atomic_add(hits + place, 1)


@triton.jit
def doubled(x, out, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    value = tl.load(x + lane)
    wide = value.to(tl.float32) if UPCAST else value
    tl.store(out + lane, (wide * 2).to(out.dtype.element_ty))


@triton.jit
def product(a, b, out, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    i = tl.arange(0, BLOCK)
    square = i[:, None] * BLOCK + i[None, :]
    left, right = tl.load(a + square), tl.load(b + square)
    if UPCAST:
        left, right = left.to(tl.float32), right.to(tl.float32)
    tl.store(out + square, tl.dot(left, right))


def test_a_lane_past_the_end_of_a_cpu_tensor_is_named() -> None:
    x, out = torch.zeros(10), torch.zeros(16)
    with check_lanes(), pytest.raises(Fault) as caught:
        add_one[(2,)](x, out, 10, BLOCK=8, MASKED=False)
    text = str(caught.value)
    assert caught.value.kind == "out_of_bounds"
    assert "kernel add_one, program (1, 0, 0), 6 lanes" in text and "0 bytes past the end of x (40 bytes)" in text


def test_masked_lanes_may_point_anywhere() -> None:
    x, out = torch.arange(10.0), torch.zeros(10)
    with check_lanes():
        add_one[(2,)](x, out, 10, BLOCK=8, MASKED=True)
    assert torch.equal(out, x + 1)


def test_an_atomic_outside_faults_and_inside_counts() -> None:
    hits = torch.zeros(4, dtype=torch.int32)
    with check_lanes():
        count_all[(1,)](hits, torch.tensor([0, 1, 1, 3]), BLOCK=4)
        assert hits.tolist() == [1, 2, 0, 1]
        with pytest.raises(Fault, match="atomic_rmw in kernel count_all"):
            count_all[(1,)](hits, torch.tensor([0, 1, 1 << 20, 3]), BLOCK=4)


def test_bfloat16_without_an_upcast_faults_and_with_one_is_right() -> None:
    x, out = torch.tensor([1.5, -2.0, 0.25, 3.0], dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float32)
    with check_lanes():
        with pytest.raises(Fault, match=r"multiply on bfloat16 in kernel doubled.*upcast"):
            doubled[(1,)](x, out, BLOCK=4, UPCAST=False)
        doubled[(1,)](x, out, BLOCK=4, UPCAST=True)
    assert torch.equal(out, x.float() * 2)


def test_a_product_of_bfloat16_faults_and_of_upcast_operands_is_right() -> None:
    torch.manual_seed(0)
    a, b, out = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.zeros(16, 16)
    with check_lanes():
        with pytest.raises(Fault, match="dot on bfloat16"):
            product[(1,)](a, b, out, BLOCK=16, UPCAST=False)
        product[(1,)](a, b, out, BLOCK=16, UPCAST=True)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_a_kernel_runs_on_the_device_s_own_memory(sim, dev) -> None:
    x, out = torch.arange(10.0, device=dev), torch.zeros(10, device=dev)
    with sim.no_sync():
        add_one[(2,)](x, out, 10, BLOCK=8, MASKED=True)
    assert out.cpu().tolist() == [1.0 + i for i in range(10)]


def test_a_lane_past_the_end_of_a_device_tensor_is_a_fault(sim, dev) -> None:
    x, out = torch.zeros(10, device=dev), torch.zeros(16, device=dev)
    with sim.expect("out_of_bounds") as caught:
        add_one[(2,)](x, out, 10, BLOCK=8, MASKED=False)
    assert "program (1, 0, 0)" in caught.text


def test_bfloat16_arithmetic_on_the_device_is_a_fault(sim, dev) -> None:
    x, out = torch.ones(4, dtype=torch.bfloat16, device=dev), torch.zeros(4, device=dev)
    with sim.expect("wrong_arithmetic"):
        doubled[(1,)](x, out, BLOCK=4, UPCAST=False)
    doubled[(1,)](x, out, BLOCK=4, UPCAST=True)
    assert out.tolist() == [2.0] * 4


def test_a_kernel_that_reads_what_another_stream_wrote_races_unless_it_waits(sim, dev, side) -> None:
    x, out = torch.zeros(8, device=dev), torch.zeros(8, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    x.fill_(1)
    with sim.expect("race"), side:
        add_one[(1,)](x, out, 8, BLOCK=8, MASKED=True)


def test_a_kernel_that_waited_does_not_race(sim, dev, side) -> None:
    x, out = torch.zeros(8, device=dev), torch.zeros(8, device=dev)
    x.fill_(1)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        add_one[(1,)](x, out, 8, BLOCK=8, MASKED=True)
    side.synchronize()
    assert out.tolist() == [2.0] * 8


def test_kernels_on_disjoint_halves_of_one_buffer_do_not_race(sim, dev, side) -> None:
    x, out = torch.zeros(16, device=dev), torch.zeros(16, device=dev)
    side.wait_stream(torch.accelerator.current_stream())
    add_one[(1,)](x, out, 8, BLOCK=8, MASKED=True)
    with side:
        add_one[(1,)](x, out[8:], 8, BLOCK=8, MASKED=True)
    torch.accelerator.synchronize()
    assert out.tolist() == [1.0] * 16


def test_a_captured_kernel_runs_again_at_every_replay(sim, dev, side, make_graph) -> None:
    x, out = torch.zeros(8, device=dev), torch.zeros(8, device=dev)
    graph = make_graph()
    graph.capture(lambda: add_one[(1,)](x, out, 8, BLOCK=8, MASKED=True), side)
    torch.accelerator.synchronize()
    assert out.tolist() == [0.0] * 8
    for value in (1.0, 5.0):
        with side:
            x.fill_(value)
            graph.replay()
        side.synchronize()
        assert out.tolist() == [value + 1] * 8
