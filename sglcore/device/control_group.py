"""The control groups (cgroups, version 2 or 1) of this process, and what they limit. Standard
library only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from sglcore.device.system import System

TOP = PurePosixPath("/sys/fs/cgroup")
UNLIMITED = 1 << 60
"""Version 1 writes a number of about this size where there is no limit."""


def group_folders(system: System, controller: str) -> list[str]:
    """Return the folders of this process's control group and of its parents, the innermost first:
    any of them may set a limit of `controller` ("cpu" or "memory"). Not all of them exist: a
    container sees its own group at the top."""
    folders = []
    for line in (system.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = TOP / (controller if controllers else "")
        group = top / path.lstrip("/")
        folders += [str(folder) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return folders


def memory_limits(system: System) -> Iterator[tuple[int, int, str]]:
    """Yield (limit in bytes, bytes in use without droppable page cache, folder) of each control
    group of this process, and of its parents, that limits its memory; the innermost first."""
    for folder in group_folders(system, "memory"):
        limit = _number(system, f"{folder}/memory.max", f"{folder}/memory.limit_in_bytes")
        if limit is None or limit >= UNLIMITED:
            continue
        used = _number(system, f"{folder}/memory.current", f"{folder}/memory.usage_in_bytes") or 0
        yield limit, max(used - _droppable(system, folder), 0), folder


def cpu_quota(system: System) -> float | None:
    """Return the number of cores that this process may use by time, the smallest quota of its
    control groups. None: no group has a quota."""
    folders = group_folders(system, "cpu") or [str(TOP)]
    quotas = [quota for folder in folders if (quota := _quota(system, folder)) is not None]
    return min(quotas, default=None)


def _droppable(system: System, folder: str) -> int:
    """Return the bytes of the group's page cache that the kernel can drop under pressure; 0 if
    unknown. In version 1 `inactive_file` leaves out the groups inside, which the usage includes;
    there `total_inactive_file` is the figure that fits."""
    words = (line.split() for line in (system.read(f"{folder}/memory.stat") or "").splitlines())
    stats = {pair[0]: int(pair[1]) for pair in words if len(pair) == 2}
    return stats.get("total_inactive_file", stats.get("inactive_file", 0))


def _quota(system: System, folder: str) -> float | None:
    """Return the quota of one group in cores; None without one. `cpu.max` is "quota period" or "max
    period" (version 2); `cpu.cfs_quota_us` is -1 without a quota (version 1)."""
    words = (system.read(f"{folder}/cpu.max") or "").split()
    if not words:
        words = [(system.read(f"{folder}/cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _number(system: System, *paths: str) -> int | None:
    """Return the number in the first of these files that holds one; None if none does."""
    texts = ((system.read(path) or "").strip() for path in paths)
    return next((int(text) for text in texts if text.isdigit()), None)
