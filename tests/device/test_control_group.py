"""What control groups of both versions limit, read from described machines."""

from __future__ import annotations

from pathlib import Path

from sglcore.device.control_group import cpu_quota, group_folders, memory_limits
from sglcore.device.system import System

TOP = "/sys/fs/cgroup"


def machine(root: Path, groups: str, files: dict[str, str]) -> System:
    for name, text in {"/proc/self/cgroup": groups, **files}.items():
        file = root / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return System(root)


def test_a_group_and_its_parents_are_named_from_inside(tmp_path: Path) -> None:
    system = machine(tmp_path, "0::/a/b", {})
    assert group_folders(system, "cpu") == [f"{TOP}/a/b", f"{TOP}/a", TOP]
    system = machine(tmp_path, "4:cpu,memory:/j\n3:freezer:/x", {})
    assert group_folders(system, "memory") == [f"{TOP}/memory/j", f"{TOP}/memory"]
    assert group_folders(System(tmp_path / "none"), "cpu") == []


def test_page_cache_of_a_group_and_in_version_1_of_the_groups_inside_is_not_in_use(tmp_path: Path) -> None:
    stat = "cache 5\ninactive_file 7\ntotal_inactive_file 300"
    old, new = f"{TOP}/memory/j", f"{TOP}/j"
    files = {f"{old}/memory.limit_in_bytes": "1000", f"{old}/memory.usage_in_bytes": "800", f"{old}/memory.stat": stat}
    assert list(memory_limits(machine(tmp_path / "old", "4:memory:/j", files))) == [(1000, 500, old)]
    files = {f"{new}/memory.max": "1000", f"{new}/memory.current": "800", f"{new}/memory.stat": "inactive_file 7"}
    assert list(memory_limits(machine(tmp_path / "new", "0::/j", files))) == [(1000, 793, new)]


def test_a_group_without_a_limit_limits_nothing(tmp_path: Path) -> None:
    files = {f"{TOP}/a/memory.max": "max", f"{TOP}/a/cpu.max": "max 100000"}
    system = machine(tmp_path, "0::/a", files)
    assert list(memory_limits(system)) == [] and cpu_quota(system) is None
