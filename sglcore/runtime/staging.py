"""Host data on their way to the device: one block of words with its twin there, and a step's other arrays.

Where host and device share memory the twin is the same bytes. Elsewhere the host side is a ring of pinned buffers, so
that writing the next step never races with the copy of the last one still under way.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglcore.sampling.packing import lay_out, read_words, write_words

RING = 2


class PinnedBuffer:
    """`size` int32 values of host memory, `memory` as a tensor and `words` as an array, and the event of their last copy.
    Without pinned memory copies wait by themselves, and there is no event."""

    __slots__ = ("_copied", "_event", "memory", "words")

    def __init__(self, size: int, device: torch.device, pinned: bool) -> None:
        self.memory = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.words: NDArray[np.int32] = self.memory.numpy()
        self._event = torch.Event(device) if pinned else None
        self._copied = False

    def copied(self) -> None:
        """A copy from or to this buffer was just queued on the current stream."""
        if self._event is not None:
            self._event.record()
            self._copied = True

    def wait(self) -> bool:
        """Return when the last copy has passed; true if that took a wait."""
        if self._event is None or not self._copied:
            return False
        waited = not self._event.query()
        if waited:
            self._event.synchronize()
        self._copied = False
        return waited


class Lease:
    """A pinned buffer that belongs to whoever holds this."""

    __slots__ = ("__weakref__", "buffer")

    def __init__(self, buffer: PinnedBuffer) -> None:
        self.buffer = buffer


class PinnedRing:
    """Pinned buffers that grow by powers of two. One is lent again when its lease is gone and its last copy has passed.

    `waits` counts the times that a copy had not; with at most RING leases held until their copies passed it stays 0.
    """

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self._device, self.pinned = device, pinned
        self._lent: list[tuple[PinnedBuffer, weakref.ref[Lease]]] = []
        self.waits = 0

    def lease(self, size: int) -> Lease:
        """A buffer of at least `size` words; the one that was lent longest ago, or a new one while there are fewer than
        RING or all are held."""
        place = next((i for i, (_, holder) in enumerate(self._lent) if holder() is None), None)
        if place is None or len(self._lent) < RING:
            buffer = self._make(size)
        else:
            buffer, _ = self._lent.pop(place)
            self.waits += buffer.wait()
            if len(buffer.words) < size:
                buffer = self._make(size)
        lease = Lease(buffer)
        self._lent.append((buffer, weakref.ref(lease)))
        return lease

    def _make(self, size: int) -> PinnedBuffer:
        return PinnedBuffer(max(256, 1 << (size - 1).bit_length()), self._device, self.pinned)


class HostBlock:
    """`size` words of four bytes on the host and on `device`, then `spare` for one step's other arrays. At most RING commits
    may be in flight; `waits` counts those that found the copy before the last still under way."""

    def __init__(self, size: int, device: str, *, shares_memory: bool, pinned: bool, spare: int = 0) -> None:
        self.shares_memory, self.pinned, self.device = shares_memory, pinned, torch.device(device)
        self.waits = 0
        self.spare = 0 if shares_memory else spare
        self._size, self._carries, self._turn = size, 0, 0
        if shares_memory:
            self._device = torch.zeros(size, dtype=torch.int32)
            self._host = self._device.numpy()
            return
        self._mirrors = [PinnedBuffer(size + spare, self.device, pinned) for _ in range(RING)]
        self._host = np.zeros(size + spare, dtype=np.int32)
        self._device = torch.zeros(size + spare, dtype=torch.int32, device=device)
        self._copies = [(self._device[:size], mirror.memory[:size]) for mirror in self._mirrors]

    def part(self, offset: int, shape: tuple[int, ...], dtype: str = "int32") -> tuple[Tensor, NDArray]:
        """The device view and the host view of one array inside the block, of a type of four bytes."""
        end = offset + math.prod(shape)
        device, host = self._device[offset:end].view(shape), self._host[offset:end].reshape(shape)
        return device.view(getattr(torch, dtype)), host.view(dtype)

    def carry(self, size: int) -> tuple[Tensor, NDArray[np.int32]]:
        """The device view and the host view of the first `size` spare words, which the next commit sends along."""
        self._carries = size
        end = self._size + size
        return self._device[self._size : end], self._host[self._size : end]

    def commit(self) -> None:
        """Send the host side; does not wait."""
        if self.shares_memory:
            return
        end, self._carries = self._size + self._carries, 0
        mirror = self._mirrors[self._turn]
        target, source = self._copies[self._turn]
        if end != self._size:
            target, source = self._device[:end], mirror.memory[:end]
        self._turn = (self._turn + 1) % RING
        self.waits += mirror.wait()
        mirror.words[:end] = self._host[:end]
        target.copy_(source, non_blocking=True)
        mirror.copied()


class StagedArrays:
    """Host arrays of one step, by name, that have no place in the block. They ride in its spare words where they fit, and
    else in one copy of their own; `add` them, `pack` before the block's commit and `arrive` after it, then read them."""

    __slots__ = ("_arrays", "_lasting", "_lease", "_source", "_starts", "_total", "arrived")

    def __init__(self, arrays: Mapping[str, NDArray] = MappingProxyType({}), lasting: bool = False) -> None:
        """`lasting`: some are read by later steps too."""
        self._arrays = dict(arrays)
        self._lasting = lasting
        self._source: Tensor | None = None
        self._lease: Lease | None = None
        self._starts: list[int] = []
        self._total = 0
        self.arrived: dict[str, Tensor] = {}
        """All that arrived: float32, or int32 for every other dtype; where memory is shared each keeps its own."""

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def add(self, **arrays: NDArray) -> None:
        """More arrays for the same way."""
        self._arrays.update(arrays)

    def pack(self, block: HostBlock, ring: PinnedRing) -> None:
        """Write everything into pinned memory."""
        if block.shares_memory or not self._arrays:
            return
        arrays = [*self._arrays.values()]
        self._starts, self._total = lay_out(arrays)
        if self._total <= block.spare:
            self._source, words = block.carry(self._total)
        else:
            self._lease = ring.lease(self._total)
            words = self._lease.buffer.words
        write_words(words, arrays, self._starts)

    def arrive(self, block: HostBlock) -> None:
        """Make the device's views, which are right for work queued on the current stream from now on. Does not wait."""
        arrays = self._arrays
        if block.shares_memory:
            self.arrived = {n: torch.from_numpy(a if a.flags.writeable else a.copy()) for n, a in arrays.items()}
            return
        if self._lease is not None:
            buffer = self._lease.buffer
            words = torch.empty(self._total, dtype=torch.int32, device=block.device)
            words.copy_(buffer.memory[: self._total], non_blocking=True)
            buffer.copied()
        elif self._source is not None:
            words = self._source.clone() if self._lasting else self._source
        else:
            return
        self.arrived = dict(zip(arrays, read_words(words, [*arrays.values()], self._starts), strict=True))
