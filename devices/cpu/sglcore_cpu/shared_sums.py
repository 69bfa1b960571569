"""Sums and tokens of ranks on one machine, through memory that they share: what is small goes round in microseconds.

Every rank writes its part, says so, waits for the others' word, and adds all parts in the order of the ranks, so that each has the
same sum to the bit. There are two places to write to, in turn: who writes to one again has heard that everybody has read it.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglcore.device.topology import Place
from sglcore.runtime.parallel.group import Group

MOST = 1 << 20
"""Bytes of a tensor that goes this way; larger ones by the back end, which does not wait by spinning."""
LINE = 64
"""Bytes between two words that different ranks write."""
SPINS, YIELDS = 100, 2000
"""Looks at a word before the core is offered to others, and then before it is left to them for a while."""
NAP = 50e-6
FILE = "file://"
ORDERED = frozenset({"x86_64", "AMD64"})
"""Processors on which what is written first is seen first. On others a word could arrive before what it announces."""


class SharedSums(Group):
    """A group whose small sums and broadcasts go through shared memory."""

    def __init__(self, *parts: Any, path: Path, **checks: Any) -> None:
        """`path` is that of the memory, the same one for every rank; the others are those of `Group`."""
        super().__init__(*parts, **checks)
        self._path, memory = path, _opened(path, self.size)
        self._words = memoryview(memory).cast("q")
        self._step = LINE // 8
        self._round = 0
        start, both = self.size * LINE, 2 * MOST
        self._places = [
            [
                torch.frombuffer(memory, dtype=torch.uint8, count=MOST, offset=start + rank * both + half * MOST)
                for rank in range(self.size)
            ]
            for half in range(2)
        ]

    def all_reduce(self, x: Tensor) -> Tensor:
        """As that of `Group`."""
        if x.nbytes > MOST:
            return super().all_reduce(x)
        self._check("all_reduce", x)
        flat = x.view(-1)
        if self.size == 2:
            first, second = self._exchanged(flat)
            torch.add(first, second, out=flat)
        else:
            torch.sum(torch.stack(self._exchanged(flat)), 0, out=flat)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """As that of `Group`."""
        if x.nbytes > MOST:
            return super().all_gather(x)
        self._check("all_gather", x)
        return torch.stack(self._exchanged(x.view(-1))).view(self.size, *x.shape)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """As that of `Group`."""
        if x.nbytes > MOST:
            return super().broadcast(x, source)
        self._check("broadcast", x)
        flat = x.view(-1)
        found = self._exchanged(flat)
        if self.rank != source:
            flat.copy_(found[source])
        return x

    def _smaller(self, name: str, *parts: Any) -> Group:
        path = self._path.with_name(f"{self._path.name}-{name}")
        return SharedSums(*parts, path=path, checks=self._checks, in_graphs=self._in_graphs)

    def _exchanged(self, flat: Tensor) -> list[Tensor]:
        """Everybody's, by rank, readable until the call after the next. Waits for all."""
        self._round += 1
        size, dtype = flat.nbytes, flat.dtype
        parts = [place[:size].view(dtype) for place in self._places[self._round % 2]]
        parts[self.rank].copy_(flat)
        self._words[self.rank * self._step] = self._round
        for rank in range(self.size):
            self._wait_for(rank * self._step)
        return parts

    def _wait_for(self, place: int) -> None:
        """Until a rank is in this round. Whoever watches the ranks ends them all where one of them does not come."""
        words, wanted, looks = self._words, self._round, 0
        while words[place] < wanted:
            looks += 1
            if looks > YIELDS:
                time.sleep(NAP)
            elif looks > SPINS:
                os.sched_yield()


def sums_for(place: Place) -> Callable[..., Group] | None:
    """How a group at this place is made; None where ranks share no memory, or a word is no sign that what it announces is there."""
    shares = place.neighbours == place.topology.world and place.meeting.startswith(FILE)
    if not shares or platform.machine() not in ORDERED or os.name != "posix":
        return None

    def make(*parts: Any, **checks: Any) -> Group:
        path = Path(place.meeting.removeprefix(FILE)).with_name("sums")  # in a folder that their leader removes
        return SharedSums(*parts, path=path, **checks)

    return make


def memory_size(ranks: int) -> int:
    """Bytes: a word for each rank, and two places."""
    return ranks * (LINE + 2 * MOST)


def _opened(path: Path, ranks: int) -> mmap.mmap:
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(number, memory_size(ranks))
        return mmap.mmap(number, memory_size(ranks))
    finally:
        os.close(number)
