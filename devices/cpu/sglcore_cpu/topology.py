"""Which cores and memory nodes this process may use. Standard library only."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes`: the allowed logical cores of each memory node; `siblings`: logical cores that share
    a physical one.

    `quota` is the control group's limit in cores. `numbers` are the system's names for the nodes,
    and `memory` the bytes that each has free; both are empty where the system does not say.
    """

    nodes: tuple[tuple[int, ...], ...]
    siblings: tuple[tuple[int, ...], ...]
    quota: float | None = None
    numbers: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()

    def physical(self, node: int) -> tuple[int, ...]:
        """One logical core of each physical one of a node."""
        cores = self.nodes[node]
        chosen = [next((core for core in group if core in cores), None) for group in self.siblings]
        return tuple(sorted(core for core in chosen if core is not None)) or cores


def share_of(whole: Topology, part: int, parts: int) -> Topology:
    """What one of `parts` processes on the machine may use: physical cores in a row, node by node,
    or logical ones if those are too few, and its part of the quota. Where there are fewer cores
    than processes they share all of them."""
    groups = [
        tuple(core for core in group if core in node)
        for node in whole.nodes
        for group in whole.siblings
        if any(core in node for core in group)
    ]
    if len(groups) < parts:
        groups = [(core,) for group in groups for core in group]
    quota = None if whole.quota is None else whole.quota / parts
    if len(groups) < parts:
        return replace(whole, quota=quota)
    first, last = (len(groups) * each // parts for each in (part, part + 1))
    mine = {core for group in groups[first:last] for core in group}
    kept = [place for place, node in enumerate(whole.nodes) if mine.intersection(node)]
    return Topology(
        tuple(tuple(core for core in whole.nodes[place] if core in mine) for place in kept),
        whole.siblings,
        quota,
        tuple(whole.numbers[place] for place in kept) if whole.numbers else (),
        tuple(whole.memory[place] for place in kept) if whole.memory else (),
    )


def read_topology(root: Path = Path("/"), allowed: frozenset[int] | None = None) -> Topology:
    """Read the allowed cores, memory nodes, core siblings and the control group's CPU quota."""
    if allowed is None:
        allowed = _allowed()
    nodes, numbers, memory = [], [], []
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    for folder in sorted(folders, key=lambda folder: int(folder.name.removeprefix("node"))):
        cores = tuple(core for core in _parse(_text(folder / "cpulist")) if core in allowed)
        if cores:
            nodes.append(cores)
            numbers.append(int(folder.name.removeprefix("node")))
            memory.append(_free(_text(folder / "meminfo")))
    siblings = {
        tuple(c for c in _parse(_text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")))
        or (core,)
        for core in allowed
    }
    found = tuple(nodes) or (tuple(sorted(allowed)),)
    known = tuple(memory) if all(memory) else ()
    return Topology(found, tuple(sorted(siblings)), _quota(root), tuple(numbers), known)


def _allowed() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _quota(root: Path) -> float | None:
    parts = _text(root / "sys/fs/cgroup/cpu.max").split()
    if len(parts) == 2 and parts[0] != "max":
        return int(parts[0]) / int(parts[1])
    return None


def _free(meminfo: str) -> int:
    """Bytes, from a node's text; what holds files that were read counts, for the system gives it
    up."""
    words = {line.split()[2].rstrip(":"): int(line.split()[3]) << 10 for line in meminfo.splitlines() if line}
    return words.get("MemFree", 0) + words.get("FilePages", 0)


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


def core_ranges(cores: tuple[int, ...]) -> str:
    """The cores as a list, with runs joined."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
