"""Copies the results of a step to the host.

They are packed into one copy to pinned memory, on the schedule stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.runtime.staging import Lease, PinnedRing
from sglcore.runtime.streams import Streams


class Readback:
    """The results of one step on their way to the host; implements `Arriving`. Keeps their tensors
    alive.
    """

    __slots__ = ("_sent", "_tensors")

    def __init__(self, tensors: Sequence[Tensor], sent: tuple[Tensor, Lease] | None = None) -> None:
        """`sent`: the packed words and the lease of the pinned buffer that they are copied to.

        None: `read` copies each tensor from the device.
        """
        self._tensors, self._sent = tensors, sent

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that the device writes and the copy reads."""
        return [*self._tensors] if self._sent is None else [*self._tensors, self._sent[0]]

    def read(self) -> list[NDArray]:
        """Return the results as host arrays, in the order of `post`. Waits for this step only."""
        if self._sent is None:
            # Calling `cpu` on a host tensor costs about 1 us, so check first.
            return [t.numpy() if t.is_cpu else t.cpu().numpy() for t in self._tensors]
        packed, lease = self._sent
        lease.buffer.wait()
        return _unpack(lease.buffer.words[: packed.numel()].copy(), self._tensors)


class ReadbackQueue:
    """Starts the copies of steps' results to the host; `post` returns a `Readback`. `ring` lends
    the pinned memory.

    Without streams results are read from the device.
    """

    def __init__(self, streams: Streams, device: torch.device, pinned: bool) -> None:
        self._streams, self._pinned = streams, pinned
        self.ring = PinnedRing(device, pinned)

    def post(self, tensors: Sequence[Tensor]) -> Readback:
        """Start the copy of int32, float32 or bool tensors that the forward stream computes.

        Does not wait.
        """
        schedule, forward = self._streams.schedule, self._streams.forward
        if forward is None or schedule is None:
            return Readback(tensors)
        words = [_words(tensor) for tensor in tensors]
        packed = words[0] if len(words) == 1 else torch.cat(words)
        lease = self.ring.lease(max(packed.numel(), 1))
        schedule.wait_stream(forward)
        with schedule:
            if packed.numel():
                lease.buffer.memory[: packed.numel()].copy_(packed, non_blocking=self._pinned)
                packed.record_stream(schedule)
            lease.buffer.copied()
        return Readback(tensors, (packed, lease))


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    if flat.dtype is torch.bool:
        return flat.to(torch.int32)
    return flat if flat.dtype is torch.int32 else flat.view(torch.int32)


def _unpack(words: NDArray[np.int32], tensors: Sequence[Tensor]) -> list[NDArray]:
    found, start = [], 0
    for tensor in tensors:
        part = words[start : start + prod(tensor.shape)]
        start += len(part)
        if tensor.dtype is torch.bool:
            part = part != 0
        elif tensor.dtype is torch.float32:
            part = part.view(np.float32)
        found.append(part.reshape(tuple(tensor.shape)))
    return found
