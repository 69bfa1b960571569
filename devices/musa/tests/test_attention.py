"""The attention library equals the dense oracle, eager and captured; a missing or older library is refused with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from sglcore.device.package import resolve
from sglcore.runtime.attention.contract import Unavailable
from sglcore_musa import package
from sglcore_musa.graphs import make_capture
from tests.attention.on_device import Captured, Placed, place
from tests.attention.rows import Heads

DEVICE, PAGE = "musa:0", 64
HEADS = Heads(4, 2, 64)
WINDOW = Heads(4, 2, 64, window=5)
DECODE = [(3, 1), (0, 1), (30, 1), (16, 1)]
EXTEND = [(0, 5), (17, 9), (0, 16), (4, 1)]
NAMES = pytest.mark.parametrize("name", ["flash_attention", "triton"])


def backend(name: str) -> Any:
    """A backend of the package."""
    return resolve(package.attention[name], package.name)


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """On a stream of its own, as a runner does."""
    stream, mechanism = torch.Stream(torch.device(DEVICE)), make_capture()
    torch.accelerator.synchronize()
    with mechanism.capture(stream, mechanism.make_pool()) as segment:
        step()
    return segment.replay


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        *(("flash_attention", heads) for heads in (HEADS, Heads(8, 2, 128), WINDOW, Heads(4, 2, 64, scaling=0.2))),
        ("triton", WINDOW),
    ],
)
@pytest.mark.parametrize(("rows", "is_decode"), [(DECODE, True), (EXTEND, False), ([(9, 1), (0, 7)], False)])
def test_it_is_the_dense_oracle(name: str, heads: Heads, rows: Any, is_decode: bool) -> None:
    placed = place(rows, backend(name), heads, DEVICE, page_size=PAGE, decode=is_decode)
    placed.check(placed.run())


def test_lines_beyond_the_real_ones_change_nothing_and_come_out_as_zero() -> None:
    placed = place(EXTEND, backend("flash_attention"), HEADS, DEVICE, page_size=PAGE)
    count = placed.batch.num_tokens
    q, k, v = (torch.cat((part, part.new_full((3, part.shape[1]), 7.0))) for part in placed.inputs)
    assert placed.batch.out_cache_loc is not None
    placed.batch.out_cache_loc = torch.cat((placed.batch.out_cache_loc, placed.batch.out_cache_loc.new_zeros(3)))
    found = placed.run(q, k, v)
    placed.check(found[:count])
    assert not found[count:].any()


@NAMES
@pytest.mark.parametrize("heads", [HEADS, WINDOW])
def test_a_captured_bucket_serves_other_lengths_pages_and_fewer_rows(name: str, heads: Heads) -> None:
    first = place(DECODE, backend(name), heads, DEVICE, page_size=PAGE, decode=True)
    graph = Captured(first, 4, capture)
    first.check(graph.run(first))
    for seed, rows in enumerate(([(40, 1)], [(1, 1), (47, 1), (15, 1)], [(31, 1), (32, 1), (2, 1), (8, 1)]), 1):
        other = over_the_same_pools(first, rows, heads, seed)
        other.check(graph.run(other))


def over_the_same_pools(first: Placed, rows: Any, heads: Heads, seed: int) -> Placed:
    """Another case, whose cells and tables are copied over those that the graph reads."""
    other = place(rows, type(first.backend), heads, DEVICE, page_size=PAGE, decode=True, seed=seed)
    mine, theirs = first.backend, other.backend
    mine.req_to_token_pool.page_table.copy_(theirs.req_to_token_pool.page_table)
    for cells, given in zip(mine.token_to_kv_pool.kv(0), theirs.token_to_kv_pool.kv(0), strict=True):
        cells.copy_(given)
    return other


@pytest.fixture
def find() -> Callable[[], Any]:
    """How the package looks for the library."""
    return sys.modules[backend("flash_attention").__module__].find


def test_a_missing_library_is_refused_naming_both_modules_and_the_remedy(
    find: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flash_attn_interface", "mate"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unavailable, match=r"flash_attn_interface: .*mate: .*pip install mate"):
        find()


def test_a_library_without_pages_is_refused_by_what_it_lacks(
    find: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = ModuleType("older")
    vars(older)["flash_attn_with_kvcache"] = lambda q, k_cache, v_cache, cache_seqlens, softmax_scale, causal: None
    monkeypatch.setitem(sys.modules, "flash_attn_interface", older)
    monkeypatch.setitem(sys.modules, "mate", None)
    with pytest.raises(Unavailable, match="lacks cu_seqlens_q, max_seqlen_q, page_table, window_size"):
        find()


def test_the_second_module_serves_where_the_first_is_missing(
    find: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert callable(find())
