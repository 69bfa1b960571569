"""The body of a rank's process in tests of a group's operations."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglcore.runtime.parallel.process_group import Group, join
from sglcore.worker.topology import Communication, Place, Topology
from sglcore_cpu.choice import engine_of_one
from sglcore_cpu.native_graphs import NativeGraphs
from sglcore_cpu.rank_meeting import LINE, Meeting
from sglcore_cpu.shared_sums import SharedSums, sums_for
from tests.parallel.forked import forking

Body = Callable[[Group], Any]


def on_ranks(size: int, folder: Path, body: Body, *, shared: bool = False, checks: bool = False) -> list[Any]:
    """The result of `body` on each rank, by rank; an error as its text. `shared`: small tensors go
    through shared memory."""
    context = forking()
    pipes = [context.Pipe() for _ in range(size)]
    processes = []
    for rank, (_, theirs) in enumerate(pipes):
        place = Place(rank, Topology(size), f"file://{folder / 'meeting'}", rank, size)
        processes.append(context.Process(target=_be, args=(place, body, shared, checks, theirs)))
        processes[-1].start()
        theirs.close()
    try:
        return [torch.load(BytesIO(ours.recv_bytes())) for ours, _ in pipes]
    finally:
        for process in processes:
            process.join(60)
            process.kill()


def _be(place: Place, body: Body, shared: bool, checks: bool, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    make = sums_for(place, engine_of_one) if shared else Group
    assert make is not None
    group = join(place, Communication("gloo"), checks=checks, make=make)
    try:
        found = body(group)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    told = BytesIO()  # by value: shared tensors would need this process to live on
    torch.save(found, told)
    pipe.send_bytes(told.getvalue())
    group.close()


def made(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A rank's input: the same in every process."""
    found = np.random.default_rng([seed, rank]).normal(size=shape) * 10
    return torch.from_numpy(found).to(dtype)


CASES = (
    ((3,), torch.float32),
    ((0, 4), torch.float32),
    ((5, 48), torch.bfloat16),
    ((7, 2, 3), torch.float64),
    ((1, 300_000), torch.float32),
    ((9,), torch.int32),
)


def every_operation(group: Group) -> list[list[torch.Tensor]]:
    """Results of every operation on every case."""
    found = []
    for seed, (shape, dtype) in enumerate(CASES):
        mine = made(group.rank, seed, shape, dtype)
        results = [
            group.all_reduce(mine.clone()),
            group.all_gather(mine),
            group.broadcast(mine.clone(), group.size - 1),
        ]
        if shape[0]:
            tall = made(group.rank, seed + 50, (group.size * 2, 3), dtype)
            results += [group.reduce_scatter(tall), group.all_to_all(tall)]
        found.append([each.clone() for each in results])
    rows = torch.full((group.rank + 1, 2), float(group.rank))
    found.append([group.all_to_all(rows, [group.rank + 1] + [0] * (group.size - 1), _received(group))])
    found.append([torch.tensor([group.least(10 - group.rank)])])
    return found


def _parts(group: Group) -> list[Group]:
    """Four ranks in pairs, in two ways."""
    return [group.part("near", [[0, 1], [2, 3]]), group.part("far", [[0, 2], [1, 3]])]


def memories(group: Group) -> list[str]:
    """Names of the shared memory of the pairs that this rank belongs to."""
    return [str(each.__dict__["_path"].name) for each in _parts(group)]


def in_parts(group: Group) -> list[list[float]]:
    """Sums of the ranks' numbers over each pair, alternating."""
    parts = _parts(group)
    return [[each.all_reduce(torch.full((3,), 2.0**group.rank))[0].item() for each in parts] for _ in range(20)]


def _received(group: Group) -> list[int]:
    return [rank + 1 for rank in range(group.size)] if group.rank == 0 else [0] * group.size


def many_in_a_row(group: Group) -> list[list[float]]:
    """Sums and broadcasts of changing sizes, with one rank late in each, so that a buffer that is
    reused too soon shows."""
    rng, found = np.random.default_rng(3), []
    for turn in range(300):
        size, late = int(rng.integers(1, 40)), int(rng.integers(group.size))
        if late == group.rank and turn % 3 == 0:
            time.sleep(0.0003)
        x = torch.full((size,), float(turn * (group.rank + 1)))
        found.append(group.all_reduce(x).tolist() if turn % 2 else group.broadcast(x, late).tolist())
    return found


def recorded(group: Group) -> list[list[torch.Tensor]]:
    """Every operation that a recorded step may contain, recorded and eager, on changing buffers."""
    x = torch.zeros(3, 5)

    def step() -> torch.Tensor:
        parts = group.all_gather(group.all_reduce(x + 1.0))
        said = group.broadcast(parts.sum(0) * (group.rank + 1), group.size - 1)
        tall = parts.flatten(0, 1) * (group.rank + 1)
        others = group.reduce_scatter(tall), group.all_to_all(tall)
        return torch.cat([each.reshape(-1) for each in (parts, said, *others)])

    found = []
    with torch.inference_mode():
        captured = NativeGraphs().capture(step)
        for seed in range(3):
            x.copy_(made(group.rank, seed, (3, 5), torch.float32))
            found.append([captured.replay(None).clone(), step()])
    return found


class Careless(Meeting):
    """A meeting in Python: does not wait for others if `waits` is False, and has one buffer if
    `places` is 1."""

    waits, places = True, 2

    def exchange(self, x: torch.Tensor) -> int:
        address = self._own["memory"]
        words = (ctypes.c_uint32 * (self.ranks * LINE // 4)).from_address(address)
        turn = words[self.rank * LINE // 4] + 1
        half = turn % self.places
        ctypes.memmove(address + self.place(self.rank, half), x.data_ptr(), x.nbytes)
        words[self.rank * LINE // 4] = turn
        while self.waits and any(words[other * LINE // 4] < turn for other in range(self.ranks)):
            time.sleep(0)
        return half

    def sum(self, x: torch.Tensor) -> None:
        """Sum float32 values."""
        half = self.exchange(x)
        places = (self._own["memory"] + self.place(rank, half) for rank in range(self.ranks))
        parts = [np.frombuffer(ctypes.string_at(place, x.nbytes), np.float32) for place in places]
        x.view(-1).copy_(torch.from_numpy(np.sum(parts, 0, np.float32)))


def carelessly(group: Group, **care: Any) -> list[list[float]]:
    """Run `many_in_a_row` with a careless meeting."""
    assert isinstance(group, SharedSums)
    group._meeting.__class__ = type("Careless", (Careless,), care)
    return many_in_a_row(group)


def wrong_shape(group: Group) -> None:
    """Rank 1 sends one number less."""
    group.all_reduce(torch.zeros(4 - group.rank))


def wrong_operation(group: Group) -> None:
    """Rank 1 gathers while the others sum."""
    (group.all_gather if group.rank else group.all_reduce)(torch.zeros(4))


def with_holes(group: Group) -> None:
    """Sum a tensor with rows that are not contiguous."""
    group.all_reduce(torch.zeros(4, 4)[:, :2])
