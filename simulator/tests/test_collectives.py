"""Collectives between two processes, each with its own simulated device: results, and the order of
streams for synchronous and asynchronous collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import sys
import sglcore_sim
kind, rank, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sim = sglcore_sim.install(kind, memory=256 << 20)
import torch
import torch.distributed as dist
dist.init_process_group(sim.kind.collectives, init_method="file://" + file, rank=rank, world_size=2)
assert dist.get_backend() == sim.kind.collectives
dev, side = sim.device(), torch.Stream(sim.device())
x = torch.full((4,), float(rank + 1), device=dev)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 4
gathered = torch.empty(8, device=dev)
dist.all_gather_into_tensor(gathered, torch.full((4,), float(rank), device=dev))
assert gathered.tolist() == [0.0] * 4 + [1.0] * 4
parts = [torch.empty(2, device=dev) for _ in range(2)]
dist.all_gather(parts, torch.full((2,), float(rank), device=dev))
assert [p.tolist() for p in parts] == [[0.0, 0.0], [1.0, 1.0]]
mine = torch.empty(2, device=dev)
dist.reduce_scatter_tensor(mine, torch.arange(4.0, device=dev))
assert mine.tolist() == [4.0 * rank, 4.0 * rank + 2]
dist.reduce_scatter(mine, list(torch.arange(4.0, device=dev).chunk(2)))
assert mine.tolist() == [4.0 * rank, 4.0 * rank + 2]
said = torch.full((3,), float(rank), device=dev)
dist.broadcast(said, 1)
assert said.tolist() == [1.0] * 3
swapped = torch.empty(2, device=dev)
dist.all_to_all_single(swapped, torch.tensor([10.0 * rank, 10.0 * rank + 1], device=dev))
assert swapped.tolist() == [float(rank), 10.0 + rank]
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
assert work.wait() and x.tolist() == [3.0] * 4
dist.barrier()

# Bad: written on one stream, reduced on another that did not wait. Good: the same after a wait.
side.wait_stream(torch.accelerator.current_stream())
x.fill_(1)
with sim.expect("race") as caught:
    with side:
        dist.all_reduce(x)
assert "all_reduce" in caught.text
dist.barrier()
side.wait_stream(torch.accelerator.current_stream())
with side:
    dist.all_reduce(x)
with sim.expect("race"):
    x.add_(1)
torch.accelerator.current_stream().wait_stream(side)
assert x.tolist() == [2.0] * 4

# Under way: good, if the consumer waits, on whichever stream it is; bad, if nobody waits, another stream does, or what is read is
# written again or freed before.
work = dist.all_reduce(x, async_op=True)
with sim.expect("race") as caught:
    x.add_(1)
assert "all_reduce" in caught.text
work.wait()
x.add_(1)
assert x.tolist() == [5.0] * 4
work = dist.all_reduce(x, async_op=True)
side.wait_stream(torch.accelerator.current_stream())
with side:
    work.wait()
with sim.expect("race"):
    x.add_(1)
torch.accelerator.current_stream().wait_stream(side)
given, parts = torch.ones(2, device=dev), torch.empty(4, device=dev)
work = dist.all_gather_into_tensor(parts, given, async_op=True)
with sim.expect("race"):
    given.zero_()
work.wait()
assert parts.tolist() == [1.0] * 4
work = dist.all_to_all_single(parts, torch.zeros(4, device=dev), async_op=True)
with sim.expect("use_after_free"):
    torch.ones(4, device=dev)
work.wait()
assert not sim.faults
del work, caught

# In a capture: a node, which meets the other process at each replay, also on the group's own stream; or a fault, where the
# vendor's library cannot be captured.
def step():
    doubled.copy_(given * 2)
    dist.all_reduce(doubled)
    dist.all_gather_into_tensor(parts, doubled, async_op=True).wait()
    torch.mul(parts, 10, out=parts)
given, doubled, parts = torch.zeros(2, device=dev), torch.empty(2, device=dev), torch.zeros(4, device=dev)
neutral = "neutral_graph" in sim.kind.capabilities
graph = torch.accelerator.Graph() if neutral else torch.cuda.CUDAGraph()
side.wait_stream(torch.accelerator.current_stream())
if sim.kind.has_captured_collectives:
    with side:
        graph.capture_begin()
        step()
        graph.capture_end()
    assert parts.tolist() == [0.0] * 4
    for turn in (1, 2):
        given.fill_(rank + turn)
        graph.replay()
        assert parts.tolist() == [20.0 * (1 + 2 * turn)] * 4
    graph.reset()
else:
    with sim.expect("wrong_capture") as caught, side:
        graph.capture_begin()
        try:
            step()
        finally:
            graph.reset()
    assert "cannot be captured" in caught.text
    del caught
dist.barrier()
dist.destroy_process_group()
print("good")
"""


def test_two_processes_agree_and_a_collective_on_an_unordered_stream_is_a_race(sim, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, sim.kind.name]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    places = [[*command, str(rank), str(tmp_path / "store")] for rank in range(2)]
    running = [subprocess.Popen(place, env=environ, stdout=-1, stderr=-1, text=True) for place in places]
    try:
        answers = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (out, err) in zip(running, answers, strict=True):
        assert process.returncode == 0 and "good" in out, err[-3000:]


def test_the_vendor_s_name_is_registered_for_the_device(sim) -> None:
    dist = pytest.importorskip("torch.distributed")
    assert dist.Backend.default_device_backend_map[sim.kind.torch_name] == sim.kind.collectives
