"""Exchange of tensors and sums between the ranks of one machine through shared memory, by native
kernels. A rank that waits spins first, and sleeps if it waits for long."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from sglcore_cpu.native import TYPES, Engine, Recorder

LINE = 64
"""Bytes of a cache line: one for each rank's counter, before the first buffer."""


def memory_size(ranks: int, most: int) -> int:
    """Return the bytes of shared memory: a cache line for each rank's counter, and two buffers of
    `most` bytes for each rank."""
    return ranks * (LINE + 2 * most)


class Meeting:
    """Collective calls over shared memory. All ranks must make the same calls in the same order. A
    call waits for all ranks, with the GIL released."""

    def __init__(self, engine: Engine, address: int, rank: int, ranks: int, most: int) -> None:
        """`address`: the address of shared memory of `memory_size(ranks, most)` bytes, initially
        zeros. `most`: the bytes of each of a rank's two buffers, a multiple of LINE; `exchange`
        takes no larger tensor, `sum` takes any."""
        self.rank, self.ranks, self.most = rank, ranks, most
        self._own: dict[str, Any] = {"memory": address, "rank": rank, "ranks": ranks, "most": most}
        self._exchange, self._sum = engine.kernel("exchange_ranks").bind(), engine.kernel("sum_ranks").bind()
        self._round = ctypes.c_uint32.from_address(address + rank * LINE)

    def place(self, rank: int, half: int) -> int:
        """Return the byte offset of buffer `half` (0 or 1) of a rank in the shared memory."""
        return self.ranks * LINE + (rank * 2 + half) * self.most

    def exchange(self, x: Tensor) -> int:
        """Share a contiguous tensor of at most `most` bytes (not checked; the same size on every
        rank) with all ranks. Returns which of the two buffers of each rank, 0 or 1, holds its
        tensor (`place`). Other ranks may overwrite theirs as soon as this rank makes its next call,
        `sum` included: copy before."""
        self._exchange(**self._own, x=_flat(x), bytes=x.nbytes)
        return self._round.value % 2

    def sum(self, x: Tensor) -> None:
        """Replace `x`, contiguous, of a dtype in TYPES and any size, by its sum over all ranks; the
        result is bitwise equal on every rank."""
        self._sum(**self._own, x=_flat(x), count=x.numel(), type=TYPES[x.dtype])

    def record_sum(self, recording: Recorder, x: Tensor) -> bool:
        """Record `sum` of x as a kernel of the step that is being recorded, on the engine of the
        step's earlier kernels, and return True; return False, and record nothing, if the step has
        called no kernel yet."""
        kernel = recording.kernel("sum_ranks")
        if kernel is not None:
            kernel(**self._own, x=_flat(x), count=x.numel(), type=TYPES[x.dtype])
        return kernel is not None


def _flat(x: Tensor) -> int:
    """Return the address of a contiguous tensor; raises RuntimeError for another."""
    return x.view(-1).data_ptr()
