"""Which cores and memory nodes this process may use, and how many threads that makes. Standard library only."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from sglcore.device.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes`: the allowed logical cores of each memory node; `siblings`: logical cores that share a physical one."""

    nodes: tuple[tuple[int, ...], ...]
    siblings: tuple[tuple[int, ...], ...]
    quota: float | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """How many threads run, on which cores, and why."""

    threads: int
    cores: tuple[int, ...]
    reason: str

    @property
    def cores_text(self) -> str:
        """The cores as a list, with runs joined."""
        return _ranges(self.cores)


def read_topology(root: Path = Path("/"), allowed: frozenset[int] | None = None) -> Topology:
    """Read the allowed cores, memory nodes, core siblings and the control group's CPU quota."""
    if allowed is None:
        allowed = _allowed()
    nodes = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        cores = tuple(core for core in _parse(_text(folder / "cpulist")) if core in allowed)
        if cores:
            nodes.append(cores)
    siblings = {
        tuple(c for c in _parse(_text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")))
        or (core,)
        for core in allowed
    }
    return Topology(tuple(nodes) or (tuple(sorted(allowed)),), tuple(sorted(siblings)), _quota(root))


def plan_binding(topology: Topology, asked: int | None) -> Binding:
    """One thread per physical core of the largest memory node, no more than the CPU quota; `asked` overrides the count.

    More threads than the largest node has spread over all nodes.
    """
    largest = max(topology.nodes, key=len)
    every = tuple(sorted(core for node in topology.nodes for core in node))
    cores = _one_per_physical(largest, topology)
    if asked is not None:
        if asked > len(every):
            raise ConfigError(
                f"threads is {asked}, this process may use {len(every)} cores", remedy=f"ask for at most {len(every)}"
            )
        pool = next((p for p in (cores, largest, every) if len(p) >= asked), every)
        return Binding(asked, pool, f"asked for {asked}")
    threads = len(cores)
    reason = "one thread per physical core"
    if len(topology.nodes) > 1:
        reason += f" of one of {len(topology.nodes)} memory nodes"
    if topology.quota is not None and topology.quota < threads:
        threads = max(1, int(topology.quota))
        reason = f"the control group allows {topology.quota:g} cores"
    return Binding(threads, cores, reason)


def bind_threads(topology: Topology, asked: int | None) -> Binding:
    """Plan, then pin this process to the chosen cores where the machine has more than one memory node."""
    binding = plan_binding(topology, asked)
    if len(topology.nodes) > 1 and sys.platform == "linux":
        os.sched_setaffinity(0, binding.cores)
    return binding


def _allowed() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _one_per_physical(cores: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    chosen = [next((c for c in group if c in cores), None) for group in topology.siblings]
    return tuple(sorted(core for core in chosen if core is not None)) or cores


def _quota(root: Path) -> float | None:
    parts = _text(root / "sys/fs/cgroup/cpu.max").split()
    if len(parts) == 2 and parts[0] != "max":
        return int(parts[0]) / int(parts[1])
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _parse(text: str) -> list[int]:
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def _ranges(cores: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
