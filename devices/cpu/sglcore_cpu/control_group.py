"""The control groups (cgroups, version 2 or 1) of this process. Standard library only."""

from __future__ import annotations

from pathlib import Path


def group_folders(root: Path, controller: str) -> list[Path]:
    """Return the folders of this process's control group and of its parents, the innermost first:
    any of them may set a limit of `controller` ("cpu" or "memory"). Not all of them exist: a
    container sees its own group at the top."""
    folders = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = top / path.lstrip("/")
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(top))]
    return folders


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of cores whose time this process may use: the smallest quota of its control
    groups. None: no group has a quota."""
    folders = group_folders(root, "cpu") or [root / "sys/fs/cgroup"]
    quotas = [quota for quota in map(_quota, folders) if quota is not None]
    return min(quotas, default=None)


def text_of(path: Path) -> str:
    """Return the text of a file without surrounding blanks; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _quota(folder: Path) -> float | None:
    """Return the quota of one group: `cpu.max` is "quota period" or "max period" (version 2);
    `cpu.cfs_quota_us` is -1 without a quota (version 1)."""
    words = text_of(folder / "cpu.max").split()
    if not words:
        words = [text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])
