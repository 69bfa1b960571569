"""Sums and tokens of ranks on one machine, through memory that they share: what is small goes round
in microseconds.

Every rank writes its part, says so, waits for the others' word, and adds all parts in the order of
the ranks, so that each has the same sum to the bit. The waiting is native: who waits for long
sleeps, and is woken, so that a core that others want is theirs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglcore.device.topology import Place
from sglcore.runtime.overlap.turns import pause
from sglcore.runtime.parallel.group import Group
from sglcore.runtime.parallel.handle import Finished, Handle
from sglcore_cpu.meeting import Meeting, memory_size
from sglcore_cpu.native import TYPES, Engine, recorder

MOST = 1 << 20
"""Bytes that go this way at once. Larger sums go in pieces, and what else is larger by the back
end."""
NATIVE = "native"
"""The kind of graph that is a recorded step."""
FILE = "file://"


class SharedSums(Group):
    """A group whose sums, and small gathers and broadcasts, go through shared memory; recorded
    steps hold them."""

    def __init__(self, *parts: Any, path: Path, make_engine: Callable[[], Engine], **checks: Any) -> None:
        """`path` is that of the memory, zeros, the same one for every rank; `make_engine` makes an
        engine that belongs to the group. The others are those of `Group`."""
        super().__init__(*parts, **checks)
        self._path, self._make_engine = path, make_engine
        self._memory = _opened(path, self.size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._meeting = meeting = Meeting(make_engine(), address, self.rank, self.size, MOST)
        self._places = [
            [
                torch.frombuffer(self._memory, dtype=torch.uint8, count=MOST, offset=meeting.place(rank, half))
                for rank in range(self.size)
            ]
            for half in range(2)
        ]

    def goes_into(self, graph: str) -> bool:
        """A recorded step holds sums as kernels, and what else goes round as calls between them."""
        return graph == NATIVE or super().goes_into(graph)

    def all_reduce(self, x: Tensor) -> Tensor:
        """As that of `Group`."""
        is_native = x.dtype in TYPES
        recording = recorder.get()
        if recording is not None:
            if self._checks or not (is_native and self._meeting.record_sum(recording, x)):
                recording.host(self.all_reduce, x)
            return x
        if not is_native and x.nbytes > MOST:
            return super().all_reduce(x)
        self._check("all_reduce", x)
        if is_native:
            pause()
            self._meeting.sum(x)
        else:
            torch.sum(torch.stack(self._exchanged(x)), 0, out=x.view(-1))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """As that of `Group`."""
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if not is_recorded(self._gather, x, out):
            self._gather(x, out)
        return out

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """As that of `Group`."""
        if is_recorded(self.broadcast, x, source):
            return x
        if x.nbytes > MOST:
            return super().broadcast(x, source)
        self._check("broadcast", x)
        found = self._exchanged(x)
        if self.rank != source:
            x.view(-1).copy_(found[source])
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """As that of `Group`."""
        out = torch.empty((x.shape[0] // self.size, *x.shape[1:]), dtype=x.dtype)
        if not is_recorded(self._scatter, x, out):
            self._scatter(x, out)
        return out

    def all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """As that of `Group`. A recorded step has the counts with which it was recorded."""
        out = torch.empty((x.shape[0] if received is None else sum(received), *x.shape[1:]), dtype=x.dtype)
        if not is_recorded(self._exchange_rows, x, out, sent, received):
            self._exchange_rows(x, out, sent, received)
        return out

    def launch_all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Handle:
        """As that of `Group`; a recorded step has made it by then."""
        if recorder.get() is not None:
            return Finished(self.all_to_all(x, sent, received))
        return super().launch_all_to_all(x, sent, received)

    def _gather(self, x: Tensor, out: Tensor) -> None:
        if x.nbytes > MOST:
            out.copy_(super().all_gather(x))
            return
        self._check("all_gather", x)
        torch.stack(self._exchanged(x), out=out.view(self.size, -1))

    def _scatter(self, x: Tensor, out: Tensor) -> None:
        out.copy_(super().reduce_scatter(x))

    def _exchange_rows(self, x: Tensor, out: Tensor, sent: list[int] | None, received: list[int] | None) -> None:
        out.copy_(super().all_to_all(x, sent, received))

    def _smaller(self, name: str, *parts: Any) -> Group:
        path = self._path.with_name(f"{self._path.name}-{name}")
        make = self._make_engine
        return SharedSums(*parts, path=path, make_engine=make, checks=self._checks, in_graphs=self._in_graphs)

    def _exchanged(self, x: Tensor) -> list[Tensor]:
        """Everybody's, by rank, flat, readable until the call after the next. Waits for all; before
        that another half of the batch runs, if there is one."""
        pause()
        half = self._meeting.exchange(x)
        return [place[: x.nbytes].view(x.dtype) for place in self._places[half]]


def is_recorded(function: Callable[..., object], *arguments: object) -> bool:
    """Whether a step is being recorded, which then has the call."""
    recording = recorder.get()
    if recording is not None:
        recording.host(function, *arguments)
    return recording is not None


def sums_for(place: Place, make_engine: Callable[[], Engine]) -> Callable[..., Group] | None:
    """How a group at this place is made, with engines of its own; None where its ranks share no
    memory."""
    if place.neighbours != place.topology.world or not place.meeting.startswith(FILE):
        return None

    def make(*parts: Any, **checks: Any) -> Group:
        path = Path(place.meeting.removeprefix(FILE)).with_name("sums")  # in a folder that their leader removes
        return SharedSums(*parts, path=path, make_engine=make_engine, **checks)

    return make


def _opened(path: Path, ranks: int) -> mmap.mmap:
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        size = memory_size(ranks, MOST)
        os.ftruncate(number, size)
        if sys.platform == "linux":  # else a full /dev/shm is told by SIGBUS, at the first touch of a page
            os.posix_fallocate(number, 0, size)
        return mmap.mmap(number, size)
    finally:
        os.close(number)
