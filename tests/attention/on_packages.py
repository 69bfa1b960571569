"""The attention backends of a device package equal the dense oracle: eager, captured with padding,
with and without sliding windows.

A package's test file has `from tests.attention.on_packages import *` and defines `package` and
`make_capture`. It sets `ATTENTION` to the backends to test, if that is not all of them except the
reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglcore.device.facts import Facts
from sglcore.device.package import DevicePackage, resolve
from sglcore.runtime.attention.contract import Unavailable
from sglcore.runtime.graphs.capture import StreamCapture
from sglcore.runtime.memory.pools import CELL_MAJOR
from tests.attention.on_device import Captured, Placed, over_the_same_pools, place
from tests.attention.rows import Heads

__all__ = [
    "placing",
    "pytest_generate_tests",
    "test_a_captured_bucket_serves_other_lengths_pages_and_fewer_rows",
    "test_bfloat16_is_served",
    "test_it_is_the_dense_oracle",
    "test_lines_beyond_the_real_ones_change_nothing_and_come_out_as_zero",
    "test_rows_on_either_side_of_pages_partitions_and_blocks_are_whole",
]

HEADS = Heads(4, 2, 64)
GROUPED = Heads(8, 2, 64)
WINDOW = Heads(4, 2, 64, window=5)
SCALED = Heads(4, 2, 64, scaling=0.2)
DECODE = [(3, 1), (0, 1), (30, 1), (16, 1)]
EXTEND = [(0, 5), (17, 9), (0, 16), (4, 1)]


EDGES = (128, 256, 512)
"""Sizes in tokens of a page, partition or block in vendors' kernels. Tests use rows that end
before, at and after each."""
LONG = 640
CORES_OWN = ("gathered", "triton")
"""Backends of the core. They have their own tests, on short rows in small blocks."""


class Placing:
    """Cases on the device of a package, with its page size. A missing library skips the test and is
    named."""

    def __init__(self, package: DevicePackage, make_capture: Callable[[], StreamCapture]) -> None:
        self.package = package
        self.facts: Facts = resolve(package.facts, package.name)(0)
        self._make_capture = make_capture

    def place(self, rows: Any, name: str, heads: Heads = HEADS, **how: Any) -> Placed:
        """Make a case over the backend of this name."""
        try:
            kind = resolve(self.package.attention[name], self.package.name)
        except Unavailable as error:
            pytest.skip(f"needs the library of {name}: {error}")
        if reason := kind.unavailable():
            pytest.skip(f"needs a device for {name}: {reason}")
        return place(rows, kind, heads, self.facts.tensor_device, **{"page_size": self.facts.page_size, **how})

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture on a separate stream, as a runner does."""
        stream, mechanism = torch.Stream(torch.device(self.facts.tensor_device)), self._make_capture()
        torch.accelerator.synchronize()
        with mechanism.capture(stream, mechanism.make_pool()) as segment:
            step()
        return segment.replay

    def check_edge(self, name: str, edge: int) -> None:
        """Check rows around an edge, where the longest ends at the edge or one token after it:
        decoded, captured, and as prompts."""
        for seed, longest in enumerate((edge, edge + 1)):
            lengths = range(longest - 2, longest + 1)
            decode = self.place([(n - 1, 1) for n in lengths], name, decode=True, seed=seed, context=LONG)
            decode.check(decode.run())
            extend = self.place([(n - 2, 2) for n in lengths], name, seed=seed, context=LONG)
            extend.check(extend.run())
        graph = Captured(decode, 3, self.capture)
        decode.check(graph.run(decode))

    def check_captured(self, name: str, heads: Heads) -> None:
        """Check a decode bucket of four, replayed on other cases over the same pools."""
        first = self.place(DECODE, name, heads, decode=True)
        graph = Captured(first, 4, self.capture)
        first.check(graph.run(first))
        for seed, rows in enumerate(([(40, 1)], [(1, 1), (47, 1), (15, 1)], [(31, 1), (32, 1), (2, 1), (8, 1)]), 1):
            other = over_the_same_pools(first, rows, heads, seed)
            other.check(graph.run(other))


def over_heads(package: DevicePackage) -> list[str]:
    """Return the names of the package's attention backends over keys and values of heads, without
    the reference. One with a library that is missing counts as such."""
    found = []
    for name, ref in package.attention.items():
        try:
            takes = resolve(ref, package.name).facts.takes_layout(CELL_MAJOR)
        except Exception:
            takes = True
        if name != "reference" and takes:
            found.append(name)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over the backends of the module's package; `vendors_attention` only over vendors'
    own."""
    module = vars(metafunc.module)
    names = module.get("ATTENTION") or over_heads(module["package"])
    if "attention" in metafunc.fixturenames:
        metafunc.parametrize("attention", names)
    if "vendors_attention" in metafunc.fixturenames:
        metafunc.parametrize("vendors_attention", [name for name in names if name not in CORES_OWN])


@pytest.fixture(scope="module")
def placing(request: pytest.FixtureRequest) -> Placing:
    module = vars(request.module)
    return Placing(module["package"], module["make_capture"])


@pytest.mark.parametrize("heads", [HEADS, GROUPED, WINDOW, SCALED], ids=["plain", "grouped", "window", "scaled"])
@pytest.mark.parametrize(("rows", "is_decode"), [(DECODE, True), (EXTEND, False), ([(9, 1), (0, 7)], False)])
def test_it_is_the_dense_oracle(placing: Placing, attention: str, heads: Heads, rows: Any, is_decode: bool) -> None:
    placed = placing.place(rows, attention, heads, decode=is_decode)
    placed.check(placed.run())


def test_bfloat16_is_served(placing: Placing, attention: str) -> None:
    placed = placing.place(EXTEND, attention, dtype=torch.bfloat16)
    placed.check(placed.run())


def test_lines_beyond_the_real_ones_change_nothing_and_come_out_as_zero(placing: Placing, attention: str) -> None:
    placed = placing.place(EXTEND, attention)
    count = placed.batch.num_tokens
    q, k, v = (torch.cat((part, part.new_full((3, part.shape[1]), 7.0))) for part in placed.inputs)
    assert placed.batch.out_cache_loc is not None
    placed.batch.out_cache_loc = torch.cat((placed.batch.out_cache_loc, placed.batch.out_cache_loc.new_zeros(3)))
    found = placed.run(q, k, v)
    placed.check(found[:count])
    assert not found[count:].any()


@pytest.mark.parametrize("heads", [HEADS, GROUPED, WINDOW], ids=["plain", "grouped", "window"])
def test_a_captured_bucket_serves_other_lengths_pages_and_fewer_rows(
    placing: Placing, attention: str, heads: Heads
) -> None:
    placing.check_captured(attention, heads)


@pytest.mark.parametrize("edge", EDGES)
def test_rows_on_either_side_of_pages_partitions_and_blocks_are_whole(
    placing: Placing, vendors_attention: str, edge: int
) -> None:
    placing.check_edge(vendors_attention, edge)
