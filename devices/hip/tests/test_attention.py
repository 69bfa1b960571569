"""Every attention backend of the package equals the dense oracle: eager and captured, padded, with and without windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglcore.device.package import resolve
from sglcore.runtime.attention.contract import AttentionBackend, Bucket, Unavailable
from sglcore_hip import package
from sglcore_hip.graphs import make_capture
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


def test_decode_reads_no_more_tokens_than_its_partial_results_have_room_for() -> None:
    placed = place([(47, 1)], backend("aiter"), HEADS, DEVICE, decode=True)
    plan = placed.backend.plan(placed.batch)
    assert plan.rows.longest == 48  # pyright: ignore[reportAttributeAccessIssue]
    captured = placed.backend.capture_plan(Bucket(2, 2))
    pool = placed.backend.req_to_token_pool
    assert captured.rows.longest == pool.max_pages * pool.page_size  # pyright: ignore[reportAttributeAccessIssue]


def _over_the_same_pools(first: Placed, rows: Any, heads: Heads, seed: int) -> Placed:
    """Another case, whose cells and tables are copied over those that the graph reads."""
    other = place(rows, type(first.backend), heads, DEVICE, decode=True, seed=seed)
    mine, theirs = first.backend, other.backend
    mine.req_to_token_pool.page_table.copy_(theirs.req_to_token_pool.page_table)
    for cells, given in zip(mine.token_to_kv_pool.kv(0), theirs.token_to_kv_pool.kv(0), strict=True):
        cells.copy_(given)
    return other
