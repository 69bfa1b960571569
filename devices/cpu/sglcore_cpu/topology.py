"""Cores and memory nodes that this process may use. Standard library only."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from sglcore.device.control_group import cpu_quota
from sglcore.device.system import System


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes`: the allowed logical cores of each memory node. `siblings`: groups of logical cores
    that share a physical core.

    `quota`: the control group's CPU limit in cores (None: no limit). `numbers`: the system's
    numbers of the nodes. `memory`: free bytes of each node. `numbers` and `memory` are empty if the
    system does not report them.
    """

    nodes: tuple[tuple[int, ...], ...]
    siblings: tuple[tuple[int, ...], ...]
    quota: float | None = None
    numbers: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()

    def physical(self, node: int) -> tuple[int, ...]:
        """Return one logical core for each physical core of node `node` (an index into `nodes`),
        ascending; all its cores if the siblings are unknown."""
        cores = self.nodes[node]
        chosen = [next((core for core in group if core in cores), None) for group in self.siblings]
        return tuple(sorted(core for core in chosen if core is not None)) or cores


def share_of(whole: Topology, part: int, parts: int) -> Topology:
    """Return the share of process `part` (from 0) of `parts` on the machine: consecutive physical
    cores, node by node, and 1 / parts of the quota. With fewer physical cores than processes,
    logical cores are divided; with fewer logical cores, every process gets all cores."""
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
    """Read the allowed logical cores, memory nodes, core siblings and the control group's CPU quota
    from the files below `root`. `allowed`: the cores to consider (None: those that this process may
    run on). Nodes without an allowed core are left out; without node files there is one node."""
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
    return Topology(found, tuple(sorted(siblings)), cpu_quota(System(root)), tuple(numbers), known)


def _allowed() -> frozenset[int]:
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _free(meminfo: str) -> int:
    """Return a node's free bytes from the text of its meminfo, page cache included, because the
    system can drop it; 0 for an empty text."""
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
    """Return ascending cores as text with ranges, such as "0-3,8"; empty for none."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
