"""Copies host data to the device: one block of words with a device twin, and the other arrays of a
step.

If host and device share memory, both sides are the same bytes. Otherwise the host side is a ring of
pinned buffers, so that writing the next step does not race with the copy of the previous one.
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
    """`size` int32 values of host memory, and the event of their last copy.

    `memory` is the tensor, `words` the array. Without pinned memory copies are synchronous and
    there is no event.
    """

    __slots__ = ("_copied", "_event", "memory", "words")

    def __init__(self, size: int, device: torch.device, pinned: bool) -> None:
        self.memory = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.words: NDArray[np.int32] = self.memory.numpy()
        self._event = torch.Event(device) if pinned else None
        self._copied = False

    def copied(self) -> None:
        """Record that a copy from or to this buffer was queued on the current stream."""
        if self._event is not None:
            self._event.record()
            self._copied = True

    def wait(self) -> bool:
        """Wait until the last copy is done; return True if it was still in progress."""
        if self._event is None or not self._copied:
            return False
        waited = not self._event.query()
        if waited:
            self._event.synchronize()
        self._copied = False
        return waited


class Lease:
    """The right to use a pinned buffer: the buffer is free again when this object is garbage."""

    __slots__ = ("__weakref__", "buffer")

    def __init__(self, buffer: PinnedBuffer) -> None:
        self.buffer = buffer


class PinnedRing:
    """Pinned buffers that grow by powers of two.

    One is reused when its lease is gone and its last copy is done. `waits` counts reuses that had
    to wait for a copy. It stays 0 if at most RING leases are held until their copies are done.
    """

    def __init__(self, device: torch.device, pinned: bool) -> None:
        self._device, self.pinned = device, pinned
        self._lent: list[tuple[PinnedBuffer, weakref.ref[Lease]]] = []
        self.waits = 0

    def lease(self, size: int) -> Lease:
        """Return a lease of a buffer of at least `size` words: the free one that was lent first.
        Waits until its last copy is done.

        Makes a new buffer if there are fewer than RING or if all are held.
        """
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
    """`size` words of four bytes on the host and on `device`, then `spare` words for a step's other
    arrays.

    At most RING commits may be in flight; `waits` counts commits that had to wait for an earlier
    copy.
    """

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
        """Return device view and host view of one array in the block, of a four-byte dtype;
        `offset` counts words.
        """
        end = offset + math.prod(shape)
        device, host = self._device[offset:end].view(shape), self._host[offset:end].reshape(shape)
        return device.view(getattr(torch, dtype)), host.view(dtype)

    def carry(self, size: int) -> tuple[Tensor, NDArray[np.int32]]:
        """Return device and host views of the first `size` spare words; `size` is at most `spare`.

        The next commit copies them too.
        """
        self._carries = size
        end = self._size + size
        return self._device[self._size : end], self._host[self._size : end]

    def commit(self) -> None:
        """Start the copy of the host side to the device; nothing to do with shared memory.

        Waits only if the copy of the commit RING commits earlier is still in progress, or without
        pinned memory.
        """
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
    """Host arrays of one step, by name, that have no buffer in the block.

    They are copied with the block's spare words if they fit, otherwise separately: float32 keeps
    its bits, every other dtype, float64 and int64 too, becomes int32. With shared memory each array
    keeps its dtype. `add` them, `pack` before the block's commit, `arrive` after it, then read
    `arrived`.
    """

    __slots__ = ("_arrays", "_lasting", "_lease", "_source", "_starts", "_total", "arrived")

    def __init__(self, arrays: Mapping[str, NDArray] = MappingProxyType({}), lasting: bool = False) -> None:
        """`lasting`: later steps read some of the arrays too."""
        self._arrays = dict(arrays)
        self._lasting = lasting
        self._source: Tensor | None = None
        self._lease: Lease | None = None
        self._starts: list[int] = []
        self._total = 0
        self.arrived: dict[str, Tensor] = {}
        """The arrays on the device: float32, or int32 for all other dtypes.

        With shared memory each array keeps its own dtype.
        """

    def __bool__(self) -> bool:
        return bool(self._arrays)

    def add(self, **arrays: NDArray) -> None:
        """Add arrays, by name; one with a known name replaces the older. Without shared memory,
        dtypes other than float32 become int32.
        """
        self._arrays.update(arrays)

    def pack(self, block: HostBlock, ring: PinnedRing) -> None:
        """Write all arrays to the block's spare words, or, if they do not fit, to a buffer of
        `ring`. Does nothing with shared memory.
        """
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
        """Set `arrived` to the arrays on the device, valid for work queued on the current stream
        from now on. Does not wait.
        """
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
