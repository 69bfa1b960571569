"""Collectives of a group of ranks, over torch.distributed with the device's communication backend.

Every rank of a group calls the same operations in the same order. A group of one rank is `Alone`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from sglcore.core.errors import WorkerLost
from sglcore.runtime.overlap.interleave import current_turn
from sglcore.runtime.parallel.pending_collective import CollectiveError, Finished, Handle, Launched
from sglcore.runtime.parallel.single_rank import Alone
from sglcore.worker.topology import Communication, Place

TIMEOUT = timedelta(seconds=30)
"""How long a collective may wait for the other ranks.

The process monitor detects a dead rank much sooner.
"""
MEETING = timedelta(seconds=120)
"""How long ranks may take to connect to each other."""

Collective = Callable[[bool], dist.Work | None]
"""Starts a collective. True: start it asynchronously and return the work."""


class Group:
    """A group of ranks 0 to size - 1; this process is `rank`. A failed collective raises
    CollectiveError.

    Uses only functions that every torch from 2.11 on has; those that take one tensor for all parts
    were renamed. Whether a call waits depends on the backend: a tensor on a stream is ordered with
    it. With two micro-batches the other one runs before this one waits.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        size: int,
        host: dist.ProcessGroup,
        *,
        checks: bool = False,
        in_graphs: bool = False,
    ) -> None:
        """`host`: a group of the same ranks for tensors in host memory.

        `in_graphs`: captured graphs may hold sums. `checks`: ranks compare the operation before
        each collective, and each raises CollectiveError with its own one if they differ; slow.
        """
        self.rank, self.size = rank, size
        self._group, self._host = group, host
        self._checks, self._count = checks, 0
        self._in_graphs = in_graphs

    def goes_into(self, graph: str) -> bool:
        """Return whether a captured graph of this kind may hold sums of this group."""
        return self._in_graphs

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x`, which must be contiguous, over all ranks, in place, and return it."""
        self._check("all_reduce", x)
        return self._run(lambda later: dist.all_reduce(x, group=self._group, async_op=later), x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return a new tensor [size, *shape of x]: the `x` of every rank, by rank. `x` must be
        contiguous and of one shape.
        """
        self._check("all_gather", x)
        out = x.new_empty((self.size, *x.shape))
        parts = list(out.unbind(0))
        return self._run(lambda later: dist.all_gather(parts, x, group=self._group, async_op=later), out)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum `x` [size * N, ...] over all ranks and return a new tensor of this rank's N rows."""
        self._check("reduce_scatter", x)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        parts = list(x.chunk(self.size))
        return self._run(lambda later: dist.reduce_scatter(out, parts, group=self._group, async_op=later), out)

    def all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Return the rows that the ranks sent here, in rank order: [sum of received, ...].

        `sent` and `received` are this rank's numbers of rows to and from each rank, in rank order;
        x has the rows in the order in which they are sent. Both None: the rows of x divided equally
        among the ranks.
        """
        out, collective = self._exchange(x, sent, received)
        return self._run(collective, out)

    def launch_all_to_all(self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Handle:
        """Start the exchange of `all_to_all` and return its handle; `x` must not change until that
        is waited for.
        """
        out, collective = self._exchange(x, sent, received)
        turn = current_turn()
        work = self._started(collective, turn is not None)
        return Finished(out) if work is None or turn is None else Launched(work, turn, out, x, self.size)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Overwrite `x` with the `x` of rank `source` of this group, and return it."""
        self._check("broadcast", x)
        return self._run(lambda later: dist.broadcast(x, group=self._group, group_src=source, async_op=later), x)

    def least(self, value: int) -> int:
        """Return the minimum of all ranks' numbers; waits for all."""
        found = torch.tensor(value, dtype=torch.int64)
        self._wait(lambda: dist.all_reduce(found, dist.ReduceOp.MIN, group=self._host))
        return int(found)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._wait(lambda: dist.barrier(group=self._host))

    def part(self, name: str, groups: Sequence[Sequence[int]]) -> Group:
        """Return the group of this rank in a partition of this group into `groups` of ranks.

        `name` identifies the partition. Every rank calls this with the same arguments.
        """
        backend = None if self._host is self._group else dist.get_backend(self._host)
        for ranks in groups:
            own = dist.new_group(list(ranks), timeout=TIMEOUT)
            host = own if backend is None else dist.new_group(list(ranks), backend=backend, timeout=TIMEOUT)
            if self.rank in ranks:
                assert isinstance(own, dist.ProcessGroup) and isinstance(host, dist.ProcessGroup)
                found = self._smaller(f"{name}-{ranks[0]}", own, ranks.index(self.rank), len(ranks), host)
        return found

    def _smaller(self, name: str, group: dist.ProcessGroup, rank: int, size: int, host: dist.ProcessGroup) -> Group:
        """Return a group of some of these ranks. `name`, unique among the groups, is for kinds of
        groups that need one; here it is not used.
        """
        return Group(group, rank, size, host, checks=self._checks, in_graphs=self._in_graphs)

    def close(self) -> None:
        """Destroy all process groups of this process. Ranks that still wait for this one fail.
        Idempotent.
        """
        if dist.is_initialized():
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group()

    def _exchange(self, x: Tensor, sent: list[int] | None, received: list[int] | None) -> tuple[Tensor, Collective]:
        self._check("all_to_all", x, by_shape=sent is None)
        rows = x.shape[0] if received is None else sum(received)
        out = x.new_empty((rows, *x.shape[1:]))
        return out, lambda later: dist.all_to_all_single(out, x, received, sent, group=self._group, async_op=later)

    def _run(self, collective: Collective, out: Tensor) -> Tensor:
        """Run a collective and return `out` once it is there.

        With two micro-batches the collective is launched, the other micro-batch runs, then this one
        waits. Inputs and output stay alive meanwhile.
        """
        turn = current_turn()
        work = self._started(collective, turn is not None)
        if turn is None or work is None:
            return out
        turn.pause()
        try:
            work.wait()
        except (RuntimeError, ValueError) as error:
            raise self._failed(error) from error
        return out

    def _started(self, collective: Collective, later: bool) -> dist.Work | None:
        try:
            return collective(later)
        except (RuntimeError, ValueError) as error:
            raise self._failed(error) from error

    def _wait(self, function: Callable[[], object]) -> None:
        try:
            function()
        except (RuntimeError, ValueError) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CollectiveError:
        return CollectiveError(f"a collective among {self.size} ranks failed: {error}")

    def _check(self, operation: str, x: Tensor, by_shape: bool = True) -> None:
        """With `checks`, raise CollectiveError unless x is contiguous and all ranks run the same
        operation as their n-th one, on tensors of one dtype and shape (`by_shape` False: dimension
        0 may differ).
        """
        if not self._checks:
            return
        self._count += 1
        shape = tuple(x.shape) if by_shape else tuple(x.shape[1:])
        mine = f"{self._count}: {operation} of {x.dtype} {list(shape)}"
        if not x.is_contiguous():
            raise CollectiveError(f"{mine} is not contiguous")
        word = int.from_bytes(hashlib.sha256(mine.encode()).digest()[:7])
        if self.least(word) != -self.least(-word):
            raise CollectiveError(f"rank {self.rank} is at {mine}, and another rank is not")


AnyGroup = Group | Alone


def join(
    place: Place, communication: Communication, *, checks: bool = False, make: Callable[..., Group] = Group
) -> Group:
    """Connect all ranks of the topology and return the group of all; waits at most MEETING.

    Sets the timeouts of later collectives. `checks` as in `Group`; `make` makes the device's kind
    of group. If ranks do not find each other, raises WorkerLost with several hosts, and
    torch.distributed's RuntimeError on one.
    """
    try:
        return _joined(place, communication, checks, make)
    except RuntimeError as error:
        if not place.meeting.startswith("tcp:"):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise WorkerLost(
            f"rank {place.rank} has not met the others at {place.meeting}: {reason}",
            wanted="every port from 1024 on open between the hosts: the leader's own port alone is not enough, since"
            " ranks meet, and exchange tensors, at ports that the system chooses",
            remedy="open them on all hosts, or see whether another rank has ended",
        ) from error


def _joined(place: Place, communication: Communication, checks: bool, make: Callable[..., Group]) -> Group:
    world = place.topology.world
    dist.init_process_group(
        communication.backend, init_method=place.meeting, rank=place.rank, world_size=world, timeout=MEETING
    )
    own = dist.new_group(timeout=TIMEOUT)
    is_host = communication.backend == communication.host_backend
    host = own if is_host else dist.new_group(backend=communication.host_backend, timeout=TIMEOUT)
    assert isinstance(own, dist.ProcessGroup) and isinstance(host, dist.ProcessGroup)
    found = make(own, place.rank, world, host, checks=checks, in_graphs=communication.in_graphs)
    found.barrier()
    return found
