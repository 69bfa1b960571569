"""Tests of the KV cache's memory budget: a Mac's unified memory, a discrete GPU, and a CPU with
control groups."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from sglcore.device.system import System
from sglcore_mlx.memory import (
    PROCESSOR_SHARE,
    UNIFIED_SHARE,
    available_memory,
    budget,
    device_memory,
    total_memory,
)
from sglcore_mlx.thread import StreamThread
from tests.device.machines import Files, machine

GIB = 1 << 30
MEMINFO = {"/proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {40 * GIB // 1024} kB\n"}
MAC = {"memory_size": 36 * GIB, "max_recommended_working_set_size": 27 * GIB, "device_name": "Apple M3 Max"}


def group(folder: str, **files: int | str) -> Files:
    """Return the files of a control group."""
    return {f"/sys/fs/cgroup{folder}/memory.{name}": str(value) for name, value in files.items()}


def free(percent: int) -> Files:
    """Return macOS's report of free memory."""
    return {"/sysctl/kern.memorystatus_level": str(percent)}


def test_a_mac_may_use_its_recommended_working_set_less_what_lives_in_it(tmp_path: Path) -> None:
    found = budget(MAC, 2 * GIB, machine(tmp_path, free(90)))
    assert (found.total, found.available, found.default_share) == (27 * GIB, 25 * GIB, UNIFIED_SHARE)
    assert found.evidence == "36.00 GiB physical, 25.00 GiB usable by the GPU, 32.40 GiB free"


def test_a_mac_that_is_full_gives_what_is_free_and_not_what_is_recommended(tmp_path: Path) -> None:
    assert budget(MAC, 2 * GIB, machine(tmp_path, free(25))).available == 9 * GIB


def test_a_mac_that_does_not_say_what_is_free_gives_what_is_usable(tmp_path: Path) -> None:
    found = budget(MAC, 0, machine(tmp_path))
    assert found.available == 27 * GIB and found.evidence.endswith("free unknown")


def test_weights_beyond_the_recommended_working_set_leave_nothing_rather_than_less(tmp_path: Path) -> None:
    assert budget(MAC, 30 * GIB, machine(tmp_path, free(90))).available == 0


def test_a_gpu_with_memory_of_its_own_says_itself_what_is_free(tmp_path: Path) -> None:
    found = budget({"total_memory": 80 * GIB, "free_memory": 70 * GIB}, GIB, machine(tmp_path, MEMINFO))
    assert (found.total, found.available) == (80 * GIB, 70 * GIB)


def test_a_processor_has_what_the_machine_has_available(tmp_path: Path) -> None:
    found = budget({"architecture": "x86_64"}, GIB, machine(tmp_path, MEMINFO))
    assert (found.total, found.available, found.default_share) == (64 * GIB, 40 * GIB, PROCESSOR_SHARE)
    assert found.evidence == "40.00 GiB of memory available"


def test_the_tightest_control_group_limits_it_and_cached_files_do_not_count(tmp_path: Path) -> None:
    inner = group("/a/b", max=8 * GIB, current=6 * GIB, stat=f"anon 1\ninactive_file {2 * GIB}")
    outer = group("/a", max=6 * GIB, current=3 * GIB)
    system = machine(tmp_path, MEMINFO, {"/proc/self/cgroup": "0::/a/b\n"}, inner, outer)
    left, evidence = available_memory(system)
    assert left == 3 * GIB and "6.00 GiB that the control group /sys/fs/cgroup/a allows" in evidence
    assert total_memory(system) == 6 * GIB


@pytest.mark.parametrize(("limit", "left"), [(3 * GIB, GIB), (9223372036854771712, 40 * GIB)])
def test_a_group_of_version_one_limits_it_unless_its_limit_is_none(tmp_path: Path, limit: int, left: int) -> None:
    files = group("/memory/job", limit_in_bytes=limit, usage_in_bytes=2 * GIB)
    listed = {"/proc/self/cgroup": "4:cpu,memory:/job\n3:freezer:/x\n"}
    assert available_memory(machine(tmp_path, MEMINFO, listed, files))[0] == left


def test_a_group_that_is_full_or_without_a_limit_is_no_error(tmp_path: Path) -> None:
    listed = {"/proc/self/cgroup": "0::/a\n"}
    full = group("/a", max=GIB, current=2 * GIB)
    assert available_memory(machine(tmp_path / "full", MEMINFO, listed, full))[0] == 0
    unlimited = group("/a", max="max", current=2 * GIB)
    assert available_memory(machine(tmp_path / "unlimited", MEMINFO, listed, unlimited))[0] == 40 * GIB


def test_a_machine_that_does_not_say_what_is_available_has_half_of_it(tmp_path: Path) -> None:
    system = machine(tmp_path, {"/proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\n"})
    assert available_memory(system)[0] == 32 * GIB


def test_the_step_measures_this_machine_and_gives_back_what_mlx_kept_for_later() -> None:
    weights = mx.zeros(1 << 20)
    mx.eval(weights)
    del weights
    thread = StreamThread()
    found = device_memory(None, None, None, thread)
    thread.close()
    assert mx.get_cache_memory() == 0
    assert 0 < found.available <= found.total <= total_memory(System()) + (1 << 20)
    assert "GiB" in found.evidence or "MiB" in found.evidence
