"""Where ranks that share memory meet: each brings its part, and has everybody's. By native kernels;
who waits for long sleeps."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from sglcore_cpu.native import TYPES, Engine, Recorder

LINE = 64
"""Bytes between what different ranks write, and before the first place."""


def memory_size(ranks: int, most: int) -> int:
    """Bytes that ranks share: a word for each, and two places of `most` bytes."""
    return ranks * (LINE + 2 * most)


class Meeting:
    """All ranks make the same calls in the same order. A call waits for all of them, and lets other
    threads of Python run."""

    def __init__(self, engine: Engine, address: int, rank: int, ranks: int, most: int) -> None:
        """The memory of `memory_size` bytes, zeros at first, is at this address; `most` is a
        multiple of LINE."""
        self.rank, self.ranks, self.most = rank, ranks, most
        self._own: dict[str, Any] = {"memory": address, "rank": rank, "ranks": ranks, "most": most}
        self._exchange, self._sum = engine.kernel("exchange_ranks").bind(), engine.kernel("sum_ranks").bind()
        self._round = ctypes.c_uint32.from_address(address + rank * LINE)

    def place(self, rank: int, half: int) -> int:
        """Where in the memory a rank's place begins."""
        return self.ranks * LINE + (rank * 2 + half) * self.most

    def exchange(self, x: Tensor) -> int:
        """Bring a tensor of `most` bytes at most. Which place of each rank has what it brought,
        until the call after the next."""
        self._exchange(**self._own, x=_flat(x), bytes=x.nbytes)
        return self._round.value % 2

    def sum(self, x: Tensor) -> None:
        """In `x`, of a type in TYPES: the sum over all ranks, the same on each to the bit."""
        self._sum(**self._own, x=_flat(x), count=x.numel(), type=TYPES[x.dtype])

    def record_sum(self, recording: Recorder, x: Tensor) -> bool:
        """The same as one of the kernels of a step; False before the step has called another, whose
        engine it takes."""
        kernel = recording.kernel("sum_ranks")
        if kernel is not None:
            kernel(**self._own, x=_flat(x), count=x.numel(), type=TYPES[x.dtype])
        return kernel is not None


def _flat(x: Tensor) -> int:
    """The address of a tensor whose elements are one after the other; raises RuntimeError for
    another."""
    return x.view(-1).data_ptr()
