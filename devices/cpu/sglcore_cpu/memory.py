"""Memory that this process may use: the machine's, or less if a control group limits it; and the
memory that weights need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglcore.checkpoint.checkpoint_files import checkpoint_files, read_json
from sglcore.checkpoint.gguf_header import is_gguf
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.device.control_group import UNLIMITED, memory_limits
from sglcore.device.system import System
from sglcore_cpu.weight_size import folder_bytes, gguf_bytes


def weight_bytes(model: Path, asked: EngineConfig = EngineConfig()) -> int:
    """Estimate the bytes that the weights of a checkpoint take when loaded with this configuration,
    from file headers alone. `model`: a folder or one file. Returns 0 if files are missing, and the
    files' size if they are damaged; raises nothing for either, because the loader reports both."""
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
    """Return the total bytes that this process may use, and where the figure comes from, as text:
    the limit of the control group with the least memory left, or the machine's memory if the limit
    is not lower. `root`: the folder that system paths start from."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, _, where = _cgroup(root)
    return (limit, where) if limit < physical else (physical, "physical memory")


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Return the bytes that are still available to this process, and an explanation as text: the
    smaller of the machine's available memory and what the control group has left. `root`: the
    folder that system paths start from."""
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
    """Return (limit, usage, name) of the control group with the least memory left; usage in bytes,
    without page cache that can be dropped. Without a group: (UNLIMITED, 0, "no control group")."""
    groups = memory_limits(System(root))
    limit, held, folder = min(groups, key=lambda group: group[0] - group[1], default=(UNLIMITED, 0, ""))
    return limit, held, f"the control group {folder}" if folder else "no control group"
