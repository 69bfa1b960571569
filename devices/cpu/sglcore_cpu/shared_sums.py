"""Collectives of ranks on one machine through shared memory; small tensors take microseconds.

For a sum, every rank writes its part, increments its counter, waits for the other counters, and
adds all parts in rank order, so every rank has the same sum to the bit. The wait is in native code:
it spins first, then sleeps until it is woken, which leaves the core to others.
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

from sglcore.runtime.overlap.interleave import pause
from sglcore.runtime.parallel.pending_collective import Finished, Handle
from sglcore.runtime.parallel.process_group import Group
from sglcore.worker.topology import Place
from sglcore_cpu.native import TYPES, Engine, recorder
from sglcore_cpu.rank_meeting import Meeting, memory_size

MOST = 1 << 20
"""Most bytes of one exchange. Larger sums go in pieces; other larger collectives go to the group's
communication backend (gloo)."""
NATIVE = "native"
"""The kind of graph that records steps (`native_graphs`)."""
FILE = "file://"


class SharedSums(Group):
    """A group of ranks on one machine that runs sums of any size, and gathers and broadcasts of at
    most MOST bytes, through shared memory; other collectives go to the group's communication
    backend. A recorded step can contain its collectives."""

    def __init__(self, *parts: Any, path: Path, make_engine: Callable[[], Engine], **checks: Any) -> None:
        """`path`: the file of the shared memory, the same for every rank; it is created with zeros.
        `make_engine` makes the group's own engine. The other arguments are `Group`'s."""
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
        """Return whether graphs of the kind `graph` can contain the group's collectives: "native"
        ones can (sums as kernels, others as host calls between the kernels), and those that `Group`
        allows."""
        return graph == NATIVE or super().goes_into(graph)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Implements `Group.all_reduce`: replace contiguous x by its sum over all ranks, and return
        x; waits for all ranks. Float32 and bfloat16 of any size go through shared memory; other
        dtypes above MOST bytes go to the group's backend. While a step is recorded, the sum is
        recorded instead."""
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
        """Implements `Group.all_gather`: return x of all ranks as a new tensor [ranks, *x.shape].
        Above MOST bytes by the group's backend."""
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if not is_recorded(self._gather, x, out):
            self._gather(x, out)
        return out

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Implements `Group.broadcast`: overwrite x with that of rank `source`, and return x. Above
        MOST bytes by the group's backend."""
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
        """Implements `Group.reduce_scatter` by the group's backend: x [ranks * N, ...] -> this
        rank's part [N, ...] of the sum, a new tensor. A recorded step makes the call again at each
        replay."""
        out = torch.empty((x.shape[0] // self.size, *x.shape[1:]), dtype=x.dtype)
        if not is_recorded(self._scatter, x, out):
            self._scatter(x, out)
        return out

    def all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Implements `Group.all_to_all` by the group's backend: return the rows that the ranks sent
        to this one, by rank. `sent` and `received`: rows to and from each rank (None: equal parts).
        A recorded step replays the counts with which it was recorded."""
        out = torch.empty((x.shape[0] if received is None else sum(received), *x.shape[1:]), dtype=x.dtype)
        if not is_recorded(self._exchange_rows, x, out, sent, received):
            self._exchange_rows(x, out, sent, received)
        return out

    def launch_all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Handle:
        """Implements `Group.launch_all_to_all`: start the exchange and return a handle to wait on.
        While a step is recorded, the exchange is recorded, to run where it is launched, and the
        handle is finished."""
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
        """Share contiguous x (at most MOST bytes, the same size on every rank) and return the x of
        all ranks, flattened, by rank. They are views of the shared memory: copy them before the
        next collective of this group. Runs the other micro-batch, if there is one, before it waits
        for the ranks."""
        pause()
        half = self._meeting.exchange(x)
        return [place[: x.nbytes].view(x.dtype) for place in self._places[half]]


def is_recorded(function: Callable[..., object], *arguments: object) -> bool:
    """Return whether a step is being recorded on this thread; if so, record the call
    `function(*arguments)`, which only a replay makes. If not, nothing is called."""
    recording = recorder.get()
    if recording is not None:
        recording.host(function, *arguments)
    return recording is not None


def sums_for(place: Place, make_engine: Callable[[], Engine]) -> Callable[..., Group] | None:
    """Return the constructor of a `SharedSums` group at this place; None if its ranks are not all
    on one machine, or if their meeting point is not a file."""
    if place.neighbours != place.topology.world or not place.meeting.startswith(FILE):
        return None

    def make(*parts: Any, **checks: Any) -> Group:
        path = Path(place.meeting.removeprefix(FILE)).with_name("sums")  # the leader removes it
        return SharedSums(*parts, path=path, make_engine=make_engine, **checks)

    return make


def _opened(path: Path, ranks: int) -> mmap.mmap:
    number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        size = memory_size(ranks, MOST)
        os.ftruncate(number, size)
        if sys.platform == "linux":  # else a full /dev/shm shows as SIGBUS at the first access
            os.posix_fallocate(number, 0, size)
        return mmap.mmap(number, size)
    finally:
        os.close(number)
