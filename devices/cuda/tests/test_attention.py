"""Every attention backend of the package equals the dense oracle: eager and captured, padded, with and without windows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sglcore.device.package import resolve
from sglcore.runtime.attention.contract import AttentionBackend, Bucket, Unavailable
from sglcore_cuda import package
from sglcore_cuda.graphs import make_capture
from tests.attention.on_device import Captured, Placed, place
from tests.attention.rows import Heads

DEVICE = "cuda:0"
HEADS = Heads(4, 2, 64)
GROUPED = Heads(8, 2, 64)
WINDOW = Heads(4, 2, 64, window=5)
SCALED = Heads(4, 2, 64, scaling=0.2)
DECODE = [(3, 1), (0, 1), (30, 1), (16, 1)]
EXTEND = [(0, 5), (17, 9), (0, 16), (4, 1)]
NAMES = pytest.mark.parametrize("name", [name for name in package.attention if name != "reference"])


def backend(name: str) -> type[AttentionBackend]:
    """A backend of the package; a missing library skips, naming it."""
    try:
        return resolve(package.attention[name], package.name)
    except Unavailable as error:
        pytest.skip(f"needs the library of {name}: {error}")


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """On a stream of its own, as a runner does."""
    stream, mechanism = torch.Stream(torch.device(DEVICE)), make_capture()
    torch.accelerator.synchronize()
    with mechanism.capture(stream, mechanism.make_pool()) as segment:
        step()
    return segment.replay


@NAMES
@pytest.mark.parametrize("heads", [HEADS, GROUPED, WINDOW, SCALED], ids=["plain", "grouped", "window", "scaled"])
@pytest.mark.parametrize(("rows", "is_decode"), [(DECODE, True), (EXTEND, False), ([(9, 1), (0, 7)], False)])
def test_it_is_the_dense_oracle(name: str, heads: Heads, rows: Any, is_decode: bool) -> None:
    placed = place(rows, backend(name), heads, DEVICE, decode=is_decode)
    placed.check(placed.run())


@NAMES
def test_bfloat16_is_served(name: str) -> None:
    placed = place(EXTEND, backend(name), HEADS, DEVICE, torch.bfloat16)
    placed.check(placed.run())


@NAMES
def test_lines_beyond_the_real_ones_change_nothing_and_come_out_as_zero(name: str) -> None:
    placed = place(EXTEND, backend(name), HEADS, DEVICE)
    count = placed.batch.num_tokens
    q, k, v = (torch.cat((part, part.new_full((3, part.shape[1]), 7.0))) for part in placed.inputs)
    assert placed.batch.out_cache_loc is not None
    placed.batch.out_cache_loc = torch.cat((placed.batch.out_cache_loc, placed.batch.out_cache_loc.new_zeros(3)))
    found = placed.run(q, k, v)
    placed.check(found[:count])
    assert not found[count:].any()


@NAMES
@pytest.mark.parametrize("heads", [HEADS, GROUPED, WINDOW], ids=["plain", "grouped", "window"])
def test_a_captured_bucket_serves_other_lengths_pages_and_fewer_rows(name: str, heads: Heads) -> None:
    first = place(DECODE, backend(name), heads, DEVICE, decode=True)
    graph = Captured(first, 4, capture)
    first.check(graph.run(first))
    for seed, rows in enumerate(([(40, 1)], [(1, 1), (47, 1), (15, 1)], [(31, 1), (32, 1), (2, 1), (8, 1)]), 1):
        other = _over_the_same_pools(first, rows, heads, seed)
        other.check(graph.run(other))


@pytest.mark.needs("simulator")
@pytest.mark.parametrize("is_pair", [True, False])
def test_a_plan_does_not_write_over_memory_that_the_one_before_is_still_copied_from(is_pair: bool) -> None:
    sim = importlib.import_module("sglcore_sim").current()
    first = place(DECODE, backend("flashinfer"), HEADS, DEVICE, decode=True)
    other = place([(9, 1), (4, 1), (1, 1), (44, 1)], backend("flashinfer"), HEADS, DEVICE, decode=True, seed=1)
    attention: Any = first.backend
    if not is_pair:
        attention._decode = (attention._decode[0],) * 2
    torch.accelerator.synchronize()
    with nullcontext() if is_pair else sim.expect("pinned_source_changed"):
        for batch in (first.batch, other.batch):
            attention.plan(batch)
        torch.accelerator.synchronize()


@pytest.mark.needs("simulator")
@pytest.mark.parametrize("is_prefill", [False, True])
def test_planning_waits_for_nothing(is_prefill: bool) -> None:
    sim = importlib.import_module("sglcore_sim").current()
    for name in ("flashinfer", "flash_attention"):
        placed = place(EXTEND if is_prefill else DECODE, backend(name), HEADS, DEVICE, decode=not is_prefill)
        placed.backend.plan(placed.batch)
        with sim.no_sync():
            placed.backend.plan(placed.batch)


@pytest.mark.needs("simulator")
@pytest.mark.parametrize(("name", "most"), [("flashinfer", 1), ("flash_attention", 0), ("triton", 0)])
def test_a_replay_is_planned_without_a_wait_and_with_at_most_one_copy(name: str, most: int) -> None:
    sim = importlib.import_module("sglcore_sim").current()
    placed = place(DECODE, backend(name), HEADS, DEVICE, decode=True)
    plan = placed.backend.capture_plan(Bucket(4, 4))
    placed.backend.refresh(plan, placed.batch)
    torch.accelerator.synchronize()
    before = sim.stats()["h2d_copies"]
    with sim.no_sync():
        placed.backend.refresh(plan, placed.batch)
    assert sim.stats()["h2d_copies"] - before <= most


def _over_the_same_pools(first: Placed, rows: Any, heads: Heads, seed: int) -> Placed:
    """Another case, whose cells and tables are copied over those that the graph reads."""
    other = place(rows, type(first.backend), heads, DEVICE, decode=True, seed=seed)
    mine, theirs = first.backend, other.backend
    mine.req_to_token_pool.page_table.copy_(theirs.req_to_token_pool.page_table)
    for cells, given in zip(mine.token_to_kv_pool.kv(0), theirs.token_to_kv_pool.kv(0), strict=True):
        cells.copy_(given)
    return other
