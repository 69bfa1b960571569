"""How many threads run, where, and near which memory. Standard library only.

A memory node is read fast by its own cores only. Weights lie near their readers by themselves: the
thread that packs a part touches it first, on its own node, and reads that part ever after. Cells of
keys and values are read by every thread, so they are spread over the nodes page by page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from dataclasses import dataclass
from types import MappingProxyType

from sglcore.device.errors import ConfigError
from sglcore_cpu.topology import Topology, core_ranges

WORTH_SPREADING = 512 << 20
"""Bytes of weights for each node, from which reading them takes longer than the nodes wait for each
other."""
SHARE_OF_NODE = 0.8
"""Of a node's free memory that weights may take; the rest is for keys, values and all else."""
_MBIND = MappingProxyType({"x86_64": 237, "aarch64": 235})
_INTERLEAVE, _MOVE = 3, 2


@dataclass(frozen=True, slots=True)
class Placement:
    """`threads` run on `cores`, for a reason; thread i on `of_threads[i]` only (empty: anywhere
    among `cores`).

    `nodes` are the system's numbers of the memory nodes that they are near.
    """

    threads: int
    cores: tuple[int, ...]
    reason: str
    of_threads: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[int, ...] = ()

    @property
    def cores_text(self) -> str:
        """The cores as a list, with runs joined."""
        return core_ranges(self.cores)


def plan_placement(topology: Topology, asked_threads: int | None, weight_bytes: int = 0) -> Placement:
    """One thread per physical core, no more than the CPU quota; `asked_threads` overrides the
    count.

    On a machine with several memory nodes: the largest alone, or as many as it takes where the
    weights do not fit its memory, where more threads are asked for than it has, or where each
    node's share of them is worth its waits. Raises ConfigError where more threads are asked for
    than there are cores.
    """
    every = sum(len(node) for node in topology.nodes)
    if asked_threads is not None and asked_threads > every:
        raise ConfigError(
            f"threads is {asked_threads}, this process may use {every} cores", remedy=f"ask for at most {every}"
        )
    order = sorted(range(len(topology.nodes)), key=lambda node: (-len(topology.nodes[node]), node))
    count, why = _nodes_wanted(topology, order, asked_threads, weight_bytes)
    chosen = sorted(order[:count])
    threads, reason = _threads(topology, chosen, asked_threads)
    pools = [_pool(topology, node, threads, len(chosen)) for node in chosen]
    cores = tuple(sorted(core for pool in pools for core in pool))
    if len(topology.nodes) == 1:
        return Placement(threads, cores, reason)
    numbers = tuple(topology.numbers[node] for node in chosen) if topology.numbers else ()
    reason += f"; {count} of {len(topology.nodes)} memory nodes: {why}"
    return Placement(threads, cores, reason, _spread(pools, threads), numbers)


def bind_process(placement: Placement, alone: bool = True) -> None:
    """Keep this process on the placement's cores where the machine has more than one memory node,
    or others like it have the other cores. To be called before threads are made and memory is
    touched."""
    if (placement.of_threads or not alone) and sys.platform == "linux":
        os.sched_setaffinity(0, placement.cores)


def interleave(address: int, num_bytes: int, nodes: tuple[int, ...]) -> bool:
    """Spread the whole pages of [address, address + num_bytes) over memory nodes, page by page;
    content stays.

    False where there is nothing to spread over, or the system refuses: then pages lie where they
    were touched first.
    """
    number = _MBIND.get(platform.machine())
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if len(nodes) < 2 or size <= 0 or number is None or sys.platform != "linux":
        return False
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    # The system's count of bits is one more than it reads.
    arguments = (first, size, _INTERLEAVE, ctypes.addressof(words), len(words) * 64 + 1, _MOVE)
    return ctypes.CDLL(None).syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) == 0


def _nodes_wanted(topology: Topology, order: list[int], asked: int | None, weight_bytes: int) -> tuple[int, str]:
    """How many nodes, the largest first, and why."""
    if asked is not None:
        count = next(n for n in range(1, len(order) + 1) if _room(topology, order[:n]) >= asked)
        return count, f"as few as hold {asked} threads"
    fits = _that_hold(topology, order, weight_bytes)
    if fits > 1:
        return fits, f"{weight_bytes / 2**30:.1f} GiB of weights do not fit the memory of one less"
    allowed = topology.quota
    if allowed is not None and allowed <= len(topology.physical(order[0])):
        return 1, "the control group allows no more than one's cores"
    if weight_bytes >= WORTH_SPREADING * len(order):
        return len(order), "each reads its own share of the weights"
    return 1, "the weights are too few to be worth the waits between nodes"


def _that_hold(topology: Topology, order: list[int], weight_bytes: int) -> int:
    """The least number of nodes whose memory holds the weights; all, if that is not enough."""
    if not topology.memory:
        return 1
    for count in range(1, len(order)):
        if weight_bytes <= SHARE_OF_NODE * sum(topology.memory[node] for node in order[:count]):
            return count
    return len(order)


def _room(topology: Topology, nodes: list[int]) -> int:
    return sum(len(topology.nodes[node]) for node in nodes)


def _threads(topology: Topology, chosen: list[int], asked: int | None) -> tuple[int, str]:
    if asked is not None:
        return asked, f"asked for {asked}"
    threads = sum(len(topology.physical(node)) for node in chosen)
    if topology.quota is not None and topology.quota < threads:
        return max(1, int(topology.quota)), f"the control group allows {topology.quota:g} cores"
    return threads, "one thread per physical core"


def _pool(topology: Topology, node: int, threads: int, count: int) -> tuple[int, ...]:
    """The cores of a node that its threads run on: one of each physical core where those are
    enough."""
    physical = topology.physical(node)
    return physical if len(physical) * count >= threads else topology.nodes[node]


def _spread(pools: list[tuple[int, ...]], threads: int) -> tuple[tuple[int, ...], ...]:
    """Each thread's cores: threads in a row share a node, as their shares of the weights are in a
    row, and each node has as many as its part of the cores."""
    total, before, ends = sum(len(pool) for pool in pools), 0, []
    for pool in pools:
        before += len(pool)
        ends.append(round(threads * before / total))
    return tuple(pools[next(i for i, end in enumerate(ends) if thread < end)] for thread in range(threads))
