"""Available memory: the machine's, or what the tightest control group leaves."""

from __future__ import annotations

from pathlib import Path

from devices.cpu.tests.test_topology import plant
from sglcore_cpu.memory import available_memory, total_memory

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    plant(root, {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {40 * GIB // 1024} kB", **files})
    return root


def test_without_a_control_group_it_is_what_the_machine_has_free(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, {}))[0] == 40 * GIB


def test_a_group_of_version_two_limits_it_and_page_cache_does_not_count_as_used(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/a/b"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b",
            f"{group}/memory.max": str(8 * GIB),
            f"{group}/memory.current": str(6 * GIB),
            f"{group}/memory.stat": f"anon 1\ninactive_file {2 * GIB}",
        },
    )
    left, evidence = available_memory(root)
    assert left == 4 * GIB and "a/b" in evidence and "8.0 GiB" in evidence


def test_a_limit_of_an_outer_group_counts_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/memory.max": str(2 * GIB),
            "sys/fs/cgroup/a/memory.current": "0",
            "sys/fs/cgroup/a/b/memory.max": "max",
            "sys/fs/cgroup/a/b/memory.current": "0",
        },
    )
    assert available_memory(root)[0] == 2 * GIB
    assert total_memory(root)[0] == 2 * GIB


def test_a_group_of_version_one_limits_it(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,memory:/job\n3:freezer:/x",
            f"{group}/memory.limit_in_bytes": str(3 * GIB),
            f"{group}/memory.usage_in_bytes": str(2 * GIB),
            f"{group}/memory.stat": f"cache 5\ninactive_file 7\ntotal_inactive_file {GIB}",
        },
    )
    assert available_memory(root)[0] == 2 * GIB, "the usage contains the groups inside, and so does their page cache"


def test_a_group_that_is_full_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            f"{group}/memory.max": str(GIB),
            f"{group}/memory.current": str(2 * GIB),
        },
    )
    assert available_memory(root)[0] == 0
