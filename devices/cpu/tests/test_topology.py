"""Cores of described machines: memory nodes, hyper-threads, affinity, quotas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglcore_cpu.topology import Topology, read_topology, share_of

TWO_NODES = Topology(nodes=((0, 1, 4, 5), (2, 3, 6, 7)), siblings=((0, 4), (1, 5), (2, 6), (3, 7)))


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def meminfo(node: int, free: int, files: int) -> str:
    return f"Node {node} MemTotal: 999 kB\nNode {node} MemFree:  {free} kB\nNode {node} FilePages: {files} kB"


def test_one_core_stands_for_each_physical_one() -> None:
    assert TWO_NODES.physical(0) == (0, 1) and TWO_NODES.physical(1) == (2, 3)
    assert Topology(((4, 5),), ((0, 4), (1, 5))).physical(0) == (4, 5)


def test_a_machine_is_read_from_its_files(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    plant(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-1,4-5",
            "sys/devices/system/node/node0/meminfo": meminfo(0, 100, 28),
            "sys/devices/system/node/node1/cpulist": "",
            "sys/devices/system/node/node10/cpulist": "2-3,6-7",
            "sys/devices/system/node/node10/meminfo": meminfo(10, 50, 14),
            **{f"{cpu}/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}" for i in range(8)},
            "sys/fs/cgroup/cpu.max": "250000 100000",
        },
    )
    found = read_topology(tmp_path, frozenset(range(8)))
    assert found == Topology(TWO_NODES.nodes, TWO_NODES.siblings, 2.5, (0, 10), (128 << 10, 64 << 10))
    assert read_topology(tmp_path, frozenset({2, 6})).nodes == ((2, 6),)


QUOTAS = {
    "its own group": ({"cgroup": "0::/a/b", "a/b/cpu.max": "50000 100000"}, 0.5),
    "an outer group": ({"cgroup": "0::/a/b", "a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
    "the smaller of two": ({"cgroup": "0::/a/b", "a/b/cpu.max": "300000 100000", "a/cpu.max": "200000 100000"}, 2.0),
    "the top of a container": ({"cgroup": "0::/../host/path", "cpu.max": "400000 100000"}, 4.0),
    "no group is listed": ({"cpu.max": "250000 100000"}, 2.5),
    "version 1": (
        {
            "cgroup": "4:cpu,cpuacct:/j\n3:memory:/j",
            "cpu/j/cpu.cfs_quota_us": "70000",
            "cpu/j/cpu.cfs_period_us": "100000",
        },
        0.7,
    ),
    "version 1 without a quota": (
        {"cgroup": "4:cpu,cpuacct:/j", "cpu/j/cpu.cfs_quota_us": "-1", "cpu/j/cpu.cfs_period_us": "100000"},
        None,
    ),
    "another controller's group": ({"cgroup": "4:memory:/j", "memory/j/cpu.max": "50000 100000"}, None),
    "no quota": ({"cgroup": "0::/a", "a/cpu.max": "max 100000"}, None),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_the_quota_is_the_smallest_of_a_groups_and_its_parents(tmp_path: Path, case: str) -> None:
    files, quota = QUOTAS[case]
    paths = {"proc/self/cgroup" if name == "cgroup" else f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    plant(tmp_path, paths)
    assert read_topology(tmp_path, frozenset({0, 1})).quota == quota


def test_a_machine_without_such_files_is_one_node_of_the_allowed_cores(tmp_path: Path) -> None:
    assert read_topology(tmp_path, frozenset({0, 3})) == Topology(((0, 3),), ((0,), (3,)), None)


def test_processes_of_one_machine_have_cores_in_a_row_and_none_twice() -> None:
    whole = replace(TWO_NODES, quota=6.0, numbers=(0, 10), memory=(100, 50))
    halves = [share_of(whole, part, 2) for part in range(2)]
    assert [half.nodes for half in halves] == [((0, 1, 4, 5),), ((2, 3, 6, 7),)]
    assert [(half.numbers, half.memory, half.quota) for half in halves] == [((0,), (100,), 3.0), ((10,), (50,), 3.0)]
    for parts in range(1, 5):
        cores = [core for part in range(parts) for node in share_of(whole, part, parts).nodes for core in node]
        assert sorted(cores) == list(range(8)), "a core is nobody's, or two have it"
    assert share_of(whole, 1, 3).nodes == ((1, 5),)
    assert share_of(whole, 2, 3).nodes == ((2, 3, 6, 7),)


def test_processes_that_are_more_than_physical_cores_have_logical_ones() -> None:
    whole = Topology(((0, 1),), ((0, 1),))
    assert [share_of(whole, part, 2).nodes for part in range(2)] == [((0,),), ((1,),)]


def test_more_processes_than_cores_share_them_all() -> None:
    whole = Topology(((0, 1),), ((0,), (1,)))
    assert share_of(whole, 2, 3) == whole
