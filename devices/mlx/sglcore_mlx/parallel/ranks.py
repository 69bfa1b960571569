"""The ranks of a start and their collectives: mlx.distributed's ring, over TCP on one machine."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import mlx.core as mx
import numpy as np

from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.worker.topology import Place

RING = "ring"
"""The back end of mlx.distributed. The others need MPI, CUDA, or RDMA."""
HOST = "127.0.0.1"
MEETING_SECONDS = 60.0
"""How long a rank waits for the addresses of the others."""
LOST = "[ring]"
"""How an error of the back end begins; after it the others have ended or cannot be reached."""


class CollectiveError(RuntimeError):
    """A collective failed because another rank has ended. The leader tells an error of this name
    from its cause."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks, and this one's number `rank` of `size`. Every collective is called by all ranks in
    the same order with the same shapes; results have the same bits on all of them. Each is lazy."""

    group: mx.distributed.Group
    rank: int
    size: int
    neighbours: int
    """How many of the ranks are on this machine."""

    def summed(self, x: mx.array) -> mx.array:
        """Return the sum of all ranks' x, in x's shape and dtype."""
        return mx.distributed.all_sum(x, group=self.group)

    def joined(self, x: mx.array) -> mx.array:
        """Return all ranks' x [N, C] side by side, [N, size * C]."""
        rows, columns = x.shape
        parts = mx.distributed.all_gather(x, group=self.group).reshape(self.size, rows, columns)
        return parts.swapaxes(0, 1).reshape(rows, self.size * columns)

    def least(self, number: int) -> int:
        """Return the least of all ranks' numbers, from 0 to 2^62; waits."""
        halves = mx.array([number >> 31, number & ((1 << 31) - 1)], mx.int32)
        every = mx.distributed.all_gather(halves[None], group=self.group)
        return min(int(high) << 31 | int(low) for high, low in np.array(every))


def join(place: Place) -> Ranks:
    """Connect all ranks of a start on this machine, and return them; waits. Must run on the stream
    thread. Raises ConfigError for a topology or a meeting that this device does not support, and
    WorkerLost if the others do not come or cannot be reached."""
    topology = place.topology
    for name, value, remedy in (("dp", topology.dp, "--dp 1"), ("ep", topology.ep, "--ep 1")):
        if value > 1:
            raise ConfigError(f"{name} is {value}, and this device divides tensors only", remedy=remedy)
    where = urlsplit(place.meeting)
    if where.scheme != "file":
        raise ConfigError(
            "the ranks are on several hosts, which this device does not connect yet", remedy="--nodes 1, or --tp 1"
        )
    compile_apart(place.local)
    folder = Path(where.path).parent
    hosts = _addresses(folder, place.rank, topology.world)
    file = folder / f"ring-{place.rank}.json"
    file.write_text(json.dumps([[host] for host in hosts]))
    os.environ.update(MLX_RANK=str(place.rank), MLX_HOSTFILE=str(file))
    before = _sockets()
    try:
        group = mx.distributed.init(strict=True, backend=RING)
    except RuntimeError as error:
        raise WorkerLost(
            f"rank {place.rank} has not met the others: {error}", remedy="see whether another rank has ended"
        ) from error
    _send_at_once(_sockets() - before)
    return Ranks(group, group.rank(), group.size(), place.neighbours)


def compile_apart(local: int) -> None:
    """Let rank `local` of this machine compile in a folder of its own, which stays for the next
    start, unless it is the first. MLX compiles for a CPU below TMPDIR, and loads a library as soon
    as its file exists: ranks that compile the same functions at once would load half of one."""
    if not local:
        return
    folder = Path(tempfile.gettempdir()) / f"sglcore-mlx-{os.getuid()}-rank-{local}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        folder = Path(tempfile.mkdtemp(prefix="sglcore-mlx-"))
    os.environ["TMPDIR"] = str(folder)


def _addresses(folder: Path, rank: int, world: int) -> list[str]:
    """Tell the other ranks where this one listens, by a file in `folder`, and return the addresses
    of all by rank. Waits."""
    with socket.create_server((HOST, 0)) as found:
        own = f"{HOST}:{found.getsockname()[1]}"
    made = folder / f"address-{rank}.new"
    made.write_text(own)
    made.rename(folder / f"address-{rank}")
    files, until = [folder / f"address-{each}" for each in range(world)], time.monotonic() + MEETING_SECONDS
    while missing := [number for number, file in enumerate(files) if not file.exists()]:
        if time.monotonic() > until:
            raise WorkerLost(f"rank {rank} has waited {MEETING_SECONDS:.0f} s for rank {missing[0]}")
        time.sleep(0.01)
    return [file.read_text() for file in files]


def _sockets() -> set[int]:
    """Return the descriptors of this process that are sockets."""
    found: set[int] = set()
    for name in os.listdir("/dev/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def _send_at_once(descriptors: set[int]) -> None:
    """Set TCP_NODELAY on the ring's sockets: without it, each small collective may wait 40 ms for a
    delayed acknowledgement. MLX 0.32 does not set it."""
    for each in descriptors:
        with socket.socket(fileno=os.dup(each)) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6):
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def told(call: Callable[[], object]) -> None:
    """Run `call`; an error of the ring becomes a CollectiveError."""
    try:
        call()
    except RuntimeError as error:
        raise_as_lost(error)


def raise_as_lost(error: RuntimeError) -> NoReturn:
    """Raise `error` as a CollectiveError if another rank's end has caused it, else as it is."""
    if LOST in str(error):
        raise CollectiveError(f"a collective failed: {error}") from error
    raise error
