"""Threads and cores on described machines: memory nodes, hyper-threads, affinity, quotas."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglcore_cpu.topology import Topology, plan_binding, read_topology

TWO_NODES = Topology(nodes=((0, 1, 4, 5), (2, 3, 6, 7)), siblings=((0, 4), (1, 5), (2, 6), (3, 7)))


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")


def test_one_thread_per_physical_core_of_one_memory_node() -> None:
    binding = plan_binding(TWO_NODES, None)
    assert (binding.threads, binding.cores) == (2, (0, 1))
    assert "one of 2 memory nodes" in binding.reason


@pytest.mark.parametrize(("asked", "cores"), [(1, (0, 1)), (3, (0, 1, 4, 5)), (8, (0, 1, 2, 3, 4, 5, 6, 7))])
def test_an_explicit_count_is_taken_and_stays_on_as_few_nodes_as_it_can(asked: int, cores: tuple[int, ...]) -> None:
    binding = plan_binding(TWO_NODES, asked)
    assert (binding.threads, binding.cores) == (asked, cores)


def test_a_quota_lowers_the_count() -> None:
    binding = plan_binding(Topology(((0, 1, 2, 3),), ((0,), (1,), (2,), (3,)), quota=1.5), None)
    assert binding.threads == 1 and "1.5" in binding.reason


def test_cores_are_shown_as_ranges() -> None:
    assert plan_binding(TWO_NODES, 8).cores_text == "0-7"
    assert plan_binding(TWO_NODES, 3).cores_text == "0-1,4-5"


def test_a_machine_is_read_from_its_files(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    plant(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-1,4-5",
            "sys/devices/system/node/node1/cpulist": "2-3,6-7",
            **{f"{cpu}/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}" for i in range(8)},
            "sys/fs/cgroup/cpu.max": "250000 100000",
        },
    )
    found = read_topology(tmp_path, frozenset(range(8)))
    assert found == Topology(TWO_NODES.nodes, TWO_NODES.siblings, 2.5)
    assert read_topology(tmp_path, frozenset({2, 6})).nodes == ((2, 6),)


def test_a_machine_without_such_files_is_one_node_of_the_allowed_cores(tmp_path: Path) -> None:
    assert read_topology(tmp_path, frozenset({0, 3})) == Topology(((0, 3),), ((0,), (3,)), None)
