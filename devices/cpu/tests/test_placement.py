"""Threads, cores and memory nodes on described machines."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglcore.core.errors import ConfigError
from sglcore_cpu.placement import Placement, interleave, plan_placement
from sglcore_cpu.topology import Topology

GIB = 1 << 30
ONE_NODE = Topology(nodes=((0, 1, 2, 3),), siblings=((0, 2), (1, 3)))
TWO_NODES = Topology(
    nodes=((0, 1, 4, 5), (2, 3, 6, 7)),
    siblings=((0, 4), (1, 5), (2, 6), (3, 7)),
    numbers=(0, 2),
    memory=(20 * GIB, 20 * GIB),
)


@pytest.mark.parametrize(("asked", "threads", "cores"), [(None, 2, (0, 1)), (1, 1, (0, 1)), (3, 3, (0, 1, 2, 3))])
def test_one_node_leaves_threads_to_the_system(asked: int | None, threads: int, cores: tuple[int, ...]) -> None:
    found = plan_placement(ONE_NODE, asked, 100 * GIB)
    assert (found.threads, found.cores, found.of_threads, found.nodes) == (threads, cores, (), ())


def test_a_small_model_stays_on_one_node() -> None:
    found = plan_placement(TWO_NODES, None, GIB - 1)
    assert (found.threads, found.cores, found.nodes) == (2, (0, 1), (0,))
    assert found.of_threads == ((0, 1),) * 2
    assert found.reason == (
        "one thread per physical core; 1 of 2 memory nodes: the weights are too small to gain from more nodes"
    )


def test_a_large_model_is_read_by_all_nodes_each_its_share() -> None:
    found = plan_placement(TWO_NODES, None, GIB)
    assert (found.threads, found.cores, found.nodes) == (4, (0, 1, 2, 3), (0, 2))
    assert found.of_threads == ((0, 1), (0, 1), (2, 3), (2, 3))


def test_a_quota_of_one_node_s_cores_keeps_to_one_node() -> None:
    quota = Topology(TWO_NODES.nodes, TWO_NODES.siblings, 1.5, TWO_NODES.numbers, TWO_NODES.memory)
    found = plan_placement(quota, None, 8 * GIB)
    assert (found.threads, found.cores) == (1, (0, 1))
    assert "1.5" in found.reason and "1 of 2" in found.reason


def test_weights_that_one_node_can_not_hold_take_more_whatever_the_quota() -> None:
    quota = Topology(TWO_NODES.nodes, TWO_NODES.siblings, 2.0, TWO_NODES.numbers, TWO_NODES.memory)
    found = plan_placement(quota, None, 17 * GIB)
    assert (found.threads, found.of_threads) == (2, ((0, 1), (2, 3)))
    assert "17.0 GiB of weights do not fit" in found.reason


@pytest.mark.parametrize(
    ("asked", "cores"), [(1, (0, 1)), (3, (0, 1, 4, 5)), (5, (0, 1, 2, 3, 4, 5, 6, 7)), (8, (0, 1, 2, 3, 4, 5, 6, 7))]
)
def test_an_explicit_count_is_taken_and_stays_on_as_few_nodes_as_it_can(asked: int, cores: tuple[int, ...]) -> None:
    found = plan_placement(TWO_NODES, asked)
    assert (found.threads, found.cores) == (asked, cores)


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 9, but this process may use 8 cores"):
        plan_placement(TWO_NODES, 9)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.data())
def test_every_thread_has_a_place_and_nodes_follow_each_other(sizes: list[int], data: st.DataObject) -> None:
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    nodes = tuple(tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=True))
    topology = Topology(nodes, tuple((core,) for node in nodes for core in node), None, tuple(range(len(nodes))))
    asked = data.draw(st.none() | st.integers(1, sum(sizes)))
    found = plan_placement(topology, asked, data.draw(st.integers(0, 1 << 40)))
    assert set(found.cores) <= {core for node in nodes for core in node}
    if len(nodes) == 1:
        assert found.of_threads == ()
        return
    assert len(found.of_threads) == found.threads
    order = [next(place for place, node in enumerate(nodes) if cores[0] in node) for cores in found.of_threads]
    assert order == sorted(order)
    for node in set(order):
        assert order.count(node) <= len(nodes[node])


def test_cores_are_shown_as_ranges() -> None:
    assert Placement(1, (0, 1, 4, 5, 7), "").cores_text == "0-1,4-5,7"


def test_pages_are_spread_and_keep_their_content() -> None:
    cells = torch.arange(100_000)
    assert not interleave(cells.data_ptr(), cells.nbytes, (0,))
    interleave(cells.data_ptr(), cells.nbytes, (0, 1))  # refused where there is no second node
    assert torch.equal(cells, torch.arange(100_000))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="this processor's call is not known")
@pytest.mark.skipif(sys.platform != "linux", reason="this system has no memory policy")
def test_a_range_takes_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """With node 0 listed twice, `interleave` makes the real system call on any machine, and
    numa_maps shows the policy."""
    text = (
        "import mmap, ctypes, sglcore_cpu.placement as p\n"
        "held = mmap.mmap(-1, 1 << 20)\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(held))\n"
        "assert p.interleave(address, 1 << 20, (0, 0))\n"
        "print([line for line in open('/proc/self/numa_maps') if line.startswith(f'{address:x} ')][0])\n"
    )
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, env=os.environ)
    if "numa_maps" in ran.stderr or "AssertionError" in ran.stderr:
        pytest.skip("this system keeps no memory policies")
    assert "interleave:0" in ran.stdout, ran.stderr
