"""Measures the duration of collectives of a group, for several tensor sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sglcore.runtime.parallel.process_group import Group

BURSTS = 7
"""Number of bursts.

The result is the smallest mean of a burst, because other work only adds time.
"""
BURST_SECONDS = 0.02
MOST_IN_BURST = 50


def measure(group: Group, device: torch.device, sizes: Sequence[int]) -> list[tuple[str, int, float]]:
    """Return (operation, bytes, seconds of one call) for each size of `sizes`, first of
    "all_reduce", then of "all_to_all".

    `sizes` are bytes per rank. Every rank must call this with the same sizes; waits. The bytes are
    those of the actual tensors: equal parts for each rank, at least one number each.
    """
    found: list[tuple[str, int, float]] = []
    for size in sizes:
        columns = max(size // 4 // group.size, 1)
        x = torch.zeros(group.size, columns, dtype=torch.float32, device=device)
        for name, run in (("all_reduce", group.all_reduce), ("all_to_all", group.all_to_all)):
            found.append((name, x.nbytes, _seconds(group, run, x)))
    return found


def _seconds(group: Group, run: Callable[[Tensor], Tensor], x: Tensor) -> float:
    _burst(group, run, x, 1)  # one-time set-up
    guess = _burst(group, run, x, 2)
    count = group.least(min(max(int(BURST_SECONDS / guess), 1), MOST_IN_BURST))
    return min(_burst(group, run, x, count) for _ in range(BURSTS))


def _burst(group: Group, run: Callable[[Tensor], Tensor], x: Tensor, count: int) -> float:
    """Return the mean seconds of `count` calls in a row, until the device has finished the last."""
    group.barrier()
    start = time.perf_counter()
    for _ in range(count):
        out = run(x)
    out[0, 0].item()
    return (time.perf_counter() - start) / count
