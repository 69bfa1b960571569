"""How much memory this process may take: the machine's, or less where a control group says so; and
what weights take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglcore.checkpoint.files import checkpoint_files, read_json
from sglcore.checkpoint.gguf import is_gguf
from sglcore.device.config import EngineConfig
from sglcore.device.errors import CheckpointError, ConfigError
from sglcore_cpu.weight_size import folder_bytes, gguf_bytes

UNLIMITED = 1 << 60


def weight_bytes(model: Path, asked: EngineConfig = EngineConfig()) -> int:
    """About how many bytes the weights of a checkpoint, a folder or one file, take once they are
    loaded as asked; 0 where files are missing, and the size of files that are damaged: the loader
    names both."""
    raw = {} if model.is_file() else _config(model)
    try:
        files = (model,) if model.is_file() else checkpoint_files(model)
    except CheckpointError:
        return 0
    try:
        return gguf_bytes(model, asked) if is_gguf(model) else folder_bytes(files, raw, asked)
    except CheckpointError:
        return sum(file.stat().st_size for file in files)


def _config(folder: Path) -> dict[str, Any]:
    try:
        return read_json(folder / "config.json")
    except ConfigError:
        return {}


def total_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes this process may use in all, and where the figure comes from."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, _, where = _cgroup(root)
    return (limit, where) if limit < physical else (physical, "physical memory")


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that may still be taken: the smaller of what the machine has free and what the control
    group leaves."""
    free = _meminfo_available(root)
    limit, used, where = _cgroup(root)
    left = max(limit - used, 0)
    if left < free:
        return left, f"{left / 2**30:.1f} GiB left of the {limit / 2**30:.1f} GiB that {where} allows"
    return free, f"{free / 2**30:.1f} GiB of memory available"


def _meminfo_available(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cgroup(root: Path) -> tuple[int, int, str]:
    """(limit, use that can not be dropped, file) of the tightest control group; version 2, then
    version 1."""
    tightest = (UNLIMITED, 0, "no control group")
    for folder in _cgroup_folders(root):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is None or limit >= UNLIMITED:
            continue
        held = max((used or 0) - _droppable(folder), 0)
        if limit - held < tightest[0] - tightest[1]:
            tightest = (limit, held, f"the control group {folder}")
    return tightest


def _cgroup_folders(root: Path) -> list[Path]:
    """This process's group and all above it: any of them may hold the limit."""
    folders = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / path.lstrip("/")
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(top))]
    return folders


def _droppable(folder: Path) -> int:
    """Page cache in the group that the kernel drops under pressure."""
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _number(*candidates: Path) -> int | None:
    for path in candidates:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return UNLIMITED if text == "max" else int(text)
    return None
