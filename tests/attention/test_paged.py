"""`PageRowsAttention` passes the page table's rows and pages to a backend, and a backend over them
equals the dense oracle, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from sglcore.runtime.attention.contract import AttentionFacts
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.page_rows import PageRowsAttention, RowsPlan
from sglcore.runtime.attention.paged import cell_list, device_offsets, offsets, page_lists, window_left, with_padding
from tests.attention.on_device import Captured, place
from tests.attention.rows import Heads, make_case, visible

ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5)
HEADS = Heads(4, 2, 8)


class HostRows(PageRowsAttention):
    """Attends row by row with torch's own attention."""

    facts = AttentionFacts(features=frozenset({"sliding_window", "mixed", "capture"}))

    def attend_pages(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, plan: RowsPlan, layer: Attention) -> Tensor:
        """Define the expected result."""
        outs = []
        for row, length in enumerate(plan.seq_lens.tolist()):
            own = q[plan.starts[row] : plan.starts[row + 1]].transpose(0, 1)
            keys, values = (pages[plan.pages[row].long()].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
            group = own.shape[0] // keys.shape[1]
            k, v = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
            mask = visible(length, own.shape[1], layer.sliding_window)
            outs.append(sdpa(own, k, v, attn_mask=mask, scale=layer.scaling).transpose(0, 1))
        return torch.cat(outs)


@settings(max_examples=40)
@given(ROWS, st.sampled_from((1, 4, 16)), st.integers(0, 2**31))
def test_lists_are_the_pages_and_cells_of_every_row_in_order(rows: Any, page_size: int, seed: int) -> None:
    case = make_case(rows, HEADS, page_size, seed)
    pool, batch = case.backend.req_to_token_pool, case.batch
    assert batch.seq_lens_cpu is not None
    lists = page_lists(pool, batch, len(rows))
    pages = [own[::page_size] // page_size for own in case.cells]
    assert lists.pages.tolist() == torch.cat(pages).tolist()
    assert lists.host_starts.tolist() == lists.starts.tolist() == np.cumsum([0, *map(len, pages)]).tolist()
    lasts = [(prefix + new - 1) % page_size + 1 for prefix, new in rows]
    assert lists.host_last_lengths.tolist() == lists.last_lengths.tolist() == lasts
    cells = cell_list(pool, batch.req_pool_indices, device_offsets(batch.seq_lens), int(batch.seq_lens_cpu.sum()))
    assert cells.tolist() == torch.cat(case.cells).tolist()
    assert {lists.pages.dtype, lists.starts.dtype, cells.dtype} == {torch.int32}


def test_rows_beyond_the_batch_are_one_token_of_page_zero() -> None:
    case = make_case([(5, 1), (2, 1)], HEADS, 4, decode=True)
    batch = case.batch
    batch.req_pool_indices = torch.cat((batch.req_pool_indices, torch.zeros(2, dtype=torch.int32)))
    batch.seq_lens = torch.cat((batch.seq_lens, torch.ones(2, dtype=torch.int32)))
    lists = page_lists(case.backend.req_to_token_pool, batch, 4)
    assert lists.host_starts.tolist() == lists.starts.tolist() == [0, 2, 3, 4, 5]
    assert lists.pages[3:].tolist() == [0, 0]
    assert lists.host_last_lengths.tolist() == [2, 3, 1, 1]


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("rows", "is_decode"), [([(3, 1), (0, 1), (30, 1)], True), ([(0, 5), (17, 9), (4, 1)], False)])
def test_a_backend_over_rows_is_the_dense_oracle(rows: Any, is_decode: bool, window: int | None) -> None:
    placed = place(rows, HostRows, Heads(4, 2, 8, window), "cpu", decode=is_decode)
    placed.check(placed.run())


def test_a_captured_plan_keeps_its_addresses_and_takes_other_rows() -> None:
    first = place([(3, 1), (30, 1)], HostRows, HEADS, "cpu", decode=True)
    graph = Captured(first, 4, lambda step: step)
    assert isinstance(graph.plan, RowsPlan)
    addresses = [part.data_ptr() for part in (graph.plan.pages, graph.plan.seq_lens, graph.plan.starts)]
    assert graph.plan.starts.tolist() == [0, 1, 2, 3, 4]
    first.check(graph.run(first))
    assert [part.data_ptr() for part in (graph.plan.pages, graph.plan.seq_lens, graph.plan.starts)] == addresses


def test_a_list_that_starts_one_page_late_is_caught() -> None:
    case = make_case([(5, 3), (9, 2)], HEADS, 4)
    table = case.backend.req_to_token_pool.page_table
    table.copy_(table.roll(1, dims=1))
    wanted = torch.cat([own[::4] // 4 for own in case.cells]).tolist()
    assert page_lists(case.backend.req_to_token_pool, case.batch, 2).pages.tolist() != wanted


def test_small_things() -> None:
    assert [window_left(window) for window in (None, 1, 8)] == [-1, 0, 7]
    assert offsets(np.array([2, 0, 3], np.int32)).tolist() == [0, 2, 2, 5]
    assert with_padding(torch.ones(2, 2, 3), torch.zeros(4, 6)).sum(1).tolist() == [6.0, 6.0, 0.0, 0.0]
