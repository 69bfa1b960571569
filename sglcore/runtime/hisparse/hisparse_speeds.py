"""Measures how fast entries come from host memory, and how fast device memory is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglcore.step.hisparse_choice import Speeds

if TYPE_CHECKING:
    from sglcore.runtime.kernels.table import KernelTable
    from sglcore.runtime.parallel.rank_groups import Groups

BURSTS, IN_BURST = 3, 4
REQUESTS = 8
"""Requests that copy at a time."""


@torch.inference_mode()
def measured_speeds(
    kernels: KernelTable, row_bytes: int, rows: int, device: torch.device, groups: Groups | None = None
) -> Speeds:
    """Return the speeds of this machine, or the least of all ranks.

    Copies `rows` rows of `row_bytes` for each of some requests by `copy_rows`, from pinned memory
    and within the device. Waits for the device, and for all ranks.
    """
    count = REQUESTS * rows
    target = torch.zeros(count + 1, row_bytes, dtype=torch.uint8, device=device)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).int().to(device) + 1
    loads = torch.stack((order, order.flip(0))).view(2, REQUESTS, rows)
    counts = torch.full((REQUESTS,), rows, dtype=torch.int32, device=device)
    host = torch.zeros(count + 1, row_bytes, dtype=torch.uint8, pin_memory=True)
    link = count * row_bytes / _seconds(lambda: kernels.copy_rows(host, target, loads, counts))
    # The kernel must be done with the pinned memory before it is freed.
    torch.accelerator.synchronize(device)
    other = torch.zeros_like(target)
    memory = 2 * target.nbytes / _seconds(lambda: other.copy_(target))
    if groups is not None:
        link, memory = (float(groups.tp.least(int(each))) for each in (link, memory))
    return Speeds(link, memory)


def _seconds(run: Callable[[], object]) -> float:
    """Return the least seconds of a run, over several bursts."""
    found = []
    for _ in range(BURSTS + 1):  # the first burst includes one-time set-up
        torch.accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(IN_BURST):
            run()
        torch.accelerator.synchronize()
        found.append((time.perf_counter() - start) / IN_BURST)
    return max(min(found[1:]), 1e-9)
