"""Tests of a step's host part: pages, KV slots, padding, and rows grouped by number of tokens."""

from __future__ import annotations

import numpy as np
import pytest

from sglcore.step.emitting_rows import plan_rows
from sglcore.step.host_values import host_reader
from sglcore.step.sizing import MemorySizes
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
from sglcore_mlx.attention.prompt import PromptRow
from sglcore_mlx.forward_batch import ForwardBatch
from sglcore_mlx.inputs import SingleRows, bucket, decode_inputs, extend_values, parts_of, row_bucket
from sglcore_mlx.pool import PageTable

SIZES = MemorySizes(page_size=4, num_pages=64, max_model_len=32, max_requests=8)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def batch_of(counts: list[int], prefixes: list[int], mode: ForwardMode = ForwardMode.MIXED) -> ScheduleBatch:
    """Return a batch of requests in slots 1, 2, ... with pages 10 * slot, 10 * slot + 1, ..."""
    slots = np.arange(1, len(counts) + 1, dtype=np.int32)
    lens = np.array(counts, np.int32) + np.array(prefixes, np.int32)
    pages = [
        np.arange(-(-int(length) // 4), dtype=np.int32) + 10 * slot for slot, length in zip(slots, lens, strict=True)
    ]
    return ScheduleBatch(
        step=1,
        forward_mode=mode,
        slots=slots,
        seq_lens=lens,
        prefix_lens=np.array(prefixes, np.int32),
        token_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        input_ids=np.arange(sum(counts), dtype=np.int32),
        page_counts=np.zeros(len(counts), np.int32),
        new_page_offsets=np.concatenate([[0], np.cumsum([len(p) for p in pages])]).astype(np.int32),
        new_pages=np.concatenate(pages),
        emits=np.ones(len(counts), bool),
    )


def test_pages_are_appended_after_those_that_a_slot_has() -> None:
    table, batch = PageTable(SIZES), batch_of([5, 1], [0, 3])
    table.append(batch)
    assert table.rows[1, :3].tolist() == [10, 11, 0] and table.rows[2, :2].tolist() == [20, 0]
    batch.page_counts, batch.new_pages = ints(2, 1), ints(7, 8)
    batch.new_page_offsets = ints(0, 1, 2)
    table.append(batch)
    assert table.rows[1, :4].tolist() == [10, 11, 7, 0] and table.rows[2, :3].tolist() == [20, 8, 0]


def test_every_token_has_the_position_and_the_cell_of_its_slot() -> None:
    table, batch = PageTable(SIZES), batch_of([5, 1], [0, 3])
    table.append(batch)
    values = extend_values(host_reader(ForwardBatch, is_decode=False), batch, table)
    assert values["positions"].tolist() == [0, 1, 2, 3, 4, 3]
    assert values["out_cache_loc"].tolist() == [40, 41, 42, 43, 44, 83]


def test_rows_of_one_token_are_taken_together_and_the_others_each_by_itself() -> None:
    table, batch = PageTable(SIZES), batch_of([1, 1, 4, 3, 1], [6, 2, 0, 5, 0])
    table.append(batch)
    first, second, third, last = parts_of(batch, table)
    assert first == SingleRows(0, 2, 0, 2) and last == SingleRows(4, 5, 9, 10)
    assert isinstance(second, PromptRow) and (second.start, second.end, second.prefix) == (2, 6, 0)
    assert isinstance(third, PromptRow) and third.cells.tolist() == [160, 161, 162, 163, 164, 165, 166, 167]


def test_padding_rows_are_of_slot_0_write_to_page_0_and_have_one_token() -> None:
    table, batch = PageTable(SIZES), batch_of([1, 1], [6, 2], ForwardMode.DECODE)
    table.append(batch)
    given = decode_inputs(ForwardBatch, batch, table, 4, 3)
    assert given.fields["req_pool_indices"].tolist() == [1, 2, 0, 0]
    assert given.fields["seq_lens"].tolist() == [7, 3, 1, 1]
    assert given.fields["out_cache_loc"].tolist() == [46, 82, 0, 0]
    assert given.page_table.tolist() == [[10, 11, 0], [20, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("most", [1, 5, 64, 1000])
def test_a_bucket_holds_its_count_wastes_at_most_half_and_there_are_few(most: int) -> None:
    sizes = {count: bucket(count, most) for count in range(1, most + 1)}
    assert all(count <= size <= most and size <= max(1.5 * count, 1) for count, size in sizes.items())
    assert len(set(sizes.values())) <= 2 * most.bit_length()


def test_the_configured_sizes_of_rows_come_first() -> None:
    assert row_bucket(3, (8, 2, 4), 256) == 4
    assert row_bucket(9, (8, 2, 4), 256) == 12
    assert row_bucket(300, (8,), 256) == 300


def test_rows_that_do_not_emit_have_no_place_in_the_results() -> None:
    batch = batch_of([2, 1, 3], [0, 4, 0])
    batch.emits = np.array([False, True, True])
    rows = plan_rows(batch)
    assert rows.token_offsets.tolist() == [0, 0, 1, 2] and rows.emitting is not None
    assert rows.scatter_bad(np.array([True, False])).tolist() == [False, True, False]
