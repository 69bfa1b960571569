"""The memory budget of the KV cache, for unified memory, a GPU's own memory, and the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import mlx.core as mx

from sglcore.device.control_group import memory_limits
from sglcore.device.system import System, host_system
from sglcore.step.sizing import MemoryBudget, size_text
from sglcore_mlx import sysctl
from sglcore_mlx.parallel.ranks import Ranks
from sglcore_mlx.thread import StreamThread

OWN_SHARE = 0.8
"""The share of a GPU's own memory for the KV cache; the rest is for activations, which the
allocator keeps for the next step."""
UNIFIED_SHARE = 0.6
"""The share of memory that GPU and system share: people use these machines while they serve."""
PROCESSOR_SHARE = 0.5
"""The share of the CPU's memory, which other programs use too."""


def device_memory(model: object, draft: object, ranks: Ranks | None, stream_thread: StreamThread) -> MemoryBudget:
    """Bring-up step: return the memory budget for the KV cache after the weights are loaded, those
    of the draft model too. Weights that were not evaluated do not count. `model` and `draft` are
    not read: they make the step run after loading. Ranks of one machine divide its memory, and all
    ranks have the budget of the one with the least.

    First releases memory that MLX caches for later arrays, so that it counts as free.
    """
    mx.clear_cache()
    own = budget(mx.device_info(), mx.get_active_memory(), host_system())
    if ranks is None:
        return own
    available = stream_thread.call(ranks.least, own.available // ranks.neighbours)
    return replace(
        own,
        total=own.total // ranks.neighbours,
        available=available,
        evidence=f"{own.evidence}, for {ranks.neighbours} ranks here",
    )


def budget(info: Mapping[str, str | int], active: int, system: System) -> MemoryBudget:
    """Return the budget from MLX's device `info` and `active`, the bytes of live arrays: of unified
    memory, a GPU's own memory, or the CPU's, by the entries that `info` has."""
    recommended = int(info.get("max_recommended_working_set_size", 0))
    if recommended:
        return unified(int(info["memory_size"]), recommended, active, system)
    if "free_memory" in info:
        total, free = int(info["total_memory"]), int(info["free_memory"])
        return MemoryBudget(total, free, f"{size_text(free)} of {size_text(total)} free on the GPU", OWN_SHARE)
    available, evidence = available_memory(system)
    return MemoryBudget(total_memory(system), available, evidence, PROCESSOR_SHARE)


def unified(physical: int, recommended: int, active: int, system: System) -> MemoryBudget:
    """Return the budget of unified memory: the bytes that the GPU may keep resident (`recommended`)
    minus those of live arrays (`active`), at most the system's free memory. `physical`: the
    machine's memory in bytes.

    Beyond `recommended` Metal slows down and macOS may swap. macOS reports free memory in percent;
    if it does not, that limit is left out.
    """
    usable = max(recommended - active, 0)
    parts = [f"{size_text(physical)} physical", f"{size_text(usable)} usable by the GPU"]
    percent = sysctl.number(system, "kern.memorystatus_level")
    if percent is None:
        return MemoryBudget(recommended, usable, ", ".join((*parts, "free unknown")), UNIFIED_SHARE)
    free = physical * percent // 100
    evidence = ", ".join((*parts, f"{size_text(free)} free"))
    return MemoryBudget(recommended, min(usable, free), evidence, UNIFIED_SHARE)


def total_memory(system: System) -> int:
    """Return the bytes that this process may use: the machine's memory, or the smallest limit of
    its control groups."""
    physical = _field(system.read("/proc/meminfo"), "MemTotal:")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if physical is None else physical * 1024
    return min((physical, *(limit for limit, _, _ in memory_limits(system))))


def available_memory(system: System) -> tuple[int, str]:
    """Return the available bytes, and the evidence as text: the smaller of the machine's available
    memory (half of its memory if it is not reported) and what the tightest control group leaves."""
    known = _field(system.read("/proc/meminfo"), "MemAvailable:")
    free = total_memory(system) // 2 if known is None else known * 1024
    found = [(max(limit - used, 0), limit, group) for limit, used, group in memory_limits(system)]
    left, limit, group = min(found, default=(free, 0, ""))
    if left < free:
        return left, f"{size_text(left)} left of the {size_text(limit)} that the control group {group} allows"
    return free, f"{size_text(free)} of memory available"


def _field(text: str | None, name: str) -> int | None:
    """Return the number after `name` at the beginning of a line of the text; None if there is no
    such line or no text."""
    words = (line.split() for line in (text or "").splitlines())
    return next((int(parts[1]) for parts in words if len(parts) > 1 and parts[0] == name), None)
