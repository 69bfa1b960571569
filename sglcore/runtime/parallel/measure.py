"""How long collectives of a group take, for tensors of several sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglcore.runtime.parallel.group import Group

BURSTS = 7
"""Of each the mean is taken, and of those the least: what else runs here only adds."""
BURST_SECONDS = 0.02
MOST_IN_BURST = 50


def measure(group: Group, device: torch.device, sizes: Sequence[int]) -> list[tuple[str, int, float]]:
    """(operation, bytes, seconds) of sums and of exchanges of tensors of about `sizes` bytes on each rank. Every rank calls this with
    the same; waits. Bytes are those that were moved: equal parts for each rank, of at least one number."""
    found: list[tuple[str, int, float]] = []
    for size in sizes:
        columns = max(size // 4 // group.size, 1)
        x = torch.zeros(group.size, columns, dtype=torch.float32, device=device)
        for name, run in (("all_reduce", group.all_reduce), ("all_to_all", group.all_to_all)):
            found.append((name, x.nbytes, _seconds(group, run, x)))
    return found


def _seconds(group: Group, run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    _burst(group, run, x, 1)  # what is made once
    guess = _burst(group, run, x, 2)
    count = group.least(min(max(int(BURST_SECONDS / guess), 1), MOST_IN_BURST))
    return min(_burst(group, run, x, count) for _ in range(BURSTS))


def _burst(group: Group, run: Callable[[Tensor], Tensor], x: Tensor, count: int) -> float:
    """Seconds of one of `count` in a row, until the device has done the last."""
    group.barrier()
    start = time.perf_counter()
    for _ in range(count):
        out = run(x)
    out[0, 0].item()
    return (time.perf_counter() - start) / count
