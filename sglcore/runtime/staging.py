"""One block of host int32 data and its twin on the device: many small arrays, one copy.

Where host and device share memory the twin is the same bytes. Elsewhere the host side is a ring of two mirrors, so that
writing the next step never races with the copy of the last one still under way.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

RING = 2


class HostBlock:
    """`size` int32 values on the host and on `device`. At most RING commits may be in flight."""

    def __init__(self, size: int, device: str, *, shares_memory: bool, pinned: bool) -> None:
        self._shares = shares_memory
        self._mirrors = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned and not shares_memory)]
        if not shares_memory:
            self._mirrors += [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(RING - 1)]
        self._turn = 0
        self._host = self._mirrors[0].numpy() if shares_memory else np.zeros(size, dtype=np.int32)
        self._device = self._mirrors[0] if shares_memory else torch.zeros(size, dtype=torch.int32, device=device)

    def part(self, offset: int, shape: tuple[int, ...]) -> tuple[Tensor, NDArray[np.int32]]:
        """The device view and the host view of one array inside the block."""
        end = offset + math.prod(shape)
        return self._device[offset:end].view(shape), self._host[offset:end].reshape(shape)

    def commit(self) -> None:
        """Send the host side; does not wait."""
        if self._shares:
            return
        mirror = self._mirrors[self._turn]
        self._turn = (self._turn + 1) % RING
        mirror.numpy()[:] = self._host
        self._device.copy_(mirror, non_blocking=True)

    def adopt_device_contents(self) -> None:
        """Make the host side equal to the device (after filling buffers there). Waits."""
        if not self._shares:
            self._host[:] = self._device.cpu().numpy()
