"""Number of threads, their cores, and the memory nodes (NUMA) they use. Standard library only.

Only a node's own cores read its memory fast. Weights are local to their readers by first touch: the
thread that packs a part of a weight touches it first, on its own node, and is the thread that reads
it later. Every thread reads the KV cache, so its pages are interleaved over the nodes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from dataclasses import dataclass
from types import MappingProxyType

from sglcore.core.errors import ConfigError
from sglcore_cpu.topology import Topology, core_ranges

WORTH_SPREADING = 512 << 20
"""Bytes of weights per node from which several nodes are worth it: reading them takes longer than
the nodes wait for each other."""
SHARE_OF_NODE = 0.8
"""Share of a node's free memory that weights may take; the rest is for the KV cache and other
uses."""
_MBIND = MappingProxyType({"x86_64": 237, "aarch64": 235})
_INTERLEAVE, _MOVE = 3, 2


@dataclass(frozen=True, slots=True)
class Placement:
    """`threads` threads run on `cores`; thread i on `of_threads[i]` only (empty: on any of
    `cores`).

    `reason` is for the ledger. `nodes`: the system's numbers of the memory nodes of these cores;
    empty with one node, or if the system gives no numbers.
    """

    threads: int
    cores: tuple[int, ...]
    reason: str
    of_threads: tuple[tuple[int, ...], ...] = ()
    nodes: tuple[int, ...] = ()

    @property
    def cores_text(self) -> str:
        """The cores as text, such as "0-3,8"."""
        return core_ranges(self.cores)


def plan_placement(topology: Topology, asked_threads: int | None, weight_bytes: int = 0) -> Placement:
    """Plan one thread per physical core of the chosen memory nodes, at most the CPU quota;
    `asked_threads` is the number of threads instead.

    On a machine with several memory nodes: the fewest nodes with cores for `asked_threads`; without
    it, the largest node, or more nodes if the weights do not fit its memory, or all nodes if each
    reads at least `WORTH_SPREADING` bytes of the weights and the quota is above one node's cores.
    Raises ConfigError if `asked_threads` exceeds the number of cores.
    """
    every = sum(len(node) for node in topology.nodes)
    if asked_threads is not None and asked_threads > every:
        raise ConfigError(
            f"threads is {asked_threads}, but this process may use {every} cores", remedy=f"request at most {every}"
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
    """Bind this process to the placement's cores if the machine has several memory nodes, or if
    other ranks use the other cores (`alone` is False). Call it before threads are created and
    memory is touched. Linux only; elsewhere it does nothing."""
    if (placement.of_threads or not alone) and sys.platform == "linux":
        os.sched_setaffinity(0, placement.cores)


def interleave(address: int, num_bytes: int, nodes: tuple[int, ...]) -> bool:
    """Interleave the whole pages of [address, address + num_bytes) over the memory nodes with the
    numbers `nodes`; pages that exist are moved, and their content is kept. Returns whether it did.

    False with fewer than two nodes, or if the system refuses: then a page is on the node that
    touched it first.
    """
    number = _MBIND.get(platform.machine())
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if len(nodes) < 2 or size <= 0 or number is None or sys.platform != "linux":
        return False
    words = (ctypes.c_ulong * (max(nodes) // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    # The system call reads one bit less than the count it gets.
    arguments = (first, size, _INTERLEAVE, ctypes.addressof(words), len(words) * 64 + 1, _MOVE)
    return ctypes.CDLL(None).syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) == 0


def _nodes_wanted(topology: Topology, order: list[int], asked: int | None, weight_bytes: int) -> tuple[int, str]:
    """Return how many nodes of `order` (indices into the topology, largest first) to use, and why,
    as a phrase for the ledger. `asked`: the requested number of threads, or None."""
    if asked is not None:
        count = next(n for n in range(1, len(order) + 1) if _room(topology, order[:n]) >= asked)
        return count, f"the fewest with cores for {asked} threads"
    fits = _that_hold(topology, order, weight_bytes)
    if fits > 1:
        return fits, f"{weight_bytes / 2**30:.1f} GiB of weights do not fit into fewer"
    allowed = topology.quota
    if allowed is not None and allowed <= len(topology.physical(order[0])):
        return 1, "the control group allows no more cores than one node has"
    if weight_bytes >= WORTH_SPREADING * len(order):
        return len(order), "each reads its own share of the weights"
    return 1, "the weights are too small to gain from more nodes"


def _that_hold(topology: Topology, order: list[int], weight_bytes: int) -> int:
    """Return the least number of nodes, taken from the start of `order`, such that the weights take
    at most SHARE_OF_NODE of their free memory; all nodes if none is enough, 1 if the free memory is
    unknown."""
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
        return asked, f"{asked} requested"
    threads = sum(len(topology.physical(node)) for node in chosen)
    if topology.quota is not None and topology.quota < threads:
        return max(1, int(topology.quota)), f"the control group allows {topology.quota:g} cores"
    return threads, "one thread per physical core"


def _pool(topology: Topology, node: int, threads: int, count: int) -> tuple[int, ...]:
    """Return the cores of a node for its threads: one logical core per physical core if those are
    enough for `threads` on `count` nodes, else all logical cores."""
    physical = topology.physical(node)
    return physical if len(physical) * count >= threads else topology.nodes[node]


def _spread(pools: list[tuple[int, ...]], threads: int) -> tuple[tuple[int, ...], ...]:
    """Return for each thread the cores it may run on: those of its node (one entry of `pools`).
    Consecutive threads share a node, because they read consecutive shares of the weights; a node's
    number of threads is proportional to its cores."""
    total, before, ends = sum(len(pool) for pool in pools), 0, []
    for pool in pools:
        before += len(pool)
        ends.append(round(threads * before / total))
    return tuple(pools[next(i for i, end in enumerate(ends) if thread < end)] for thread in range(threads))
