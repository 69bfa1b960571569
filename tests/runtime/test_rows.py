"""Rows of layers that keep them in forms of their own: how many bytes, where they lie, and which pages they fit."""

from __future__ import annotations

import pytest
import torch

from sglcore.device.errors import ConfigError
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.kernels.row_codec import RowCodec
from sglcore.runtime.memory.geometry import fitting_page_size, geometry
from sglcore.runtime.memory.pools import cell_bytes
from sglcore.runtime.memory.rows import KeptRows, Place, RowCounts, RowPool, page_multiple, row_bytes
from sglcore.step.sizing import Geometry

F32, BF16 = torch.float32, torch.bfloat16
PAGE = 32
KEPT = {
    "window": KeptRows(8, BF16, Place.WINDOW_PAGES),
    "blocks": KeptRows(8, BF16, ratio=4),
    "recent": KeptRows(16, F32, Place.WINDOW_PAGES, ring=8),
    "open": KeptRows(16, F32, Place.SLOTS, ring=48),
}


class Layer(Attention):
    """Keeps rows."""

    def __init__(self, layer_id: int = 0, window: int | None = 16) -> None:
        super().__init__(layer_id, 4, 1, 8, sliding_window=window, cached=False)
        self.rows = KEPT


def test_rows_are_counted_by_tokens_or_by_page_and_slot() -> None:
    assert [each.count(PAGE) for each in KEPT.values()] == [32, 8, 8, 48]
    assert [row_bytes([KEPT, KEPT], place, PAGE) for place in Place] == [
        2 * 8 * 8 * 2,
        2 * (32 * 8 * 2 + 8 * 16 * 4),
        2 * 48 * 16 * 4,
    ]


def test_with_a_codec_a_row_has_its_bytes() -> None:
    codec = RowCodec(512, 64)
    kept = KeptRows(512, BF16, codec=codec)
    assert kept.num_bytes(PAGE) == PAGE * codec.num_bytes == PAGE * 584
    pool = RowPool([{"kv": kept}], PAGE, RowCounts(2), "cpu", poison=True)
    assert pool.rows(0, "kv").shape == (3 * PAGE, 584) and pool.rows(0, "kv").dtype == torch.uint8
    assert codec.decode(pool.rows(0, "kv")[:1])[0, :448].isnan().all()
    assert pool.codec(0, "kv") is codec


@pytest.mark.parametrize("window_pages", [0, 5])
def test_a_pool_has_what_the_geometry_counts_and_what_is_nobodys(window_pages: int) -> None:
    pool = RowPool([KEPT], PAGE, RowCounts(10, window_pages, 3), "cpu")
    of_pages, of_slots = row_bytes([KEPT], Place.PAGES, PAGE), row_bytes([KEPT], Place.SLOTS, PAGE)
    of_windows = row_bytes([KEPT], Place.WINDOW_PAGES, PAGE)
    stored = sum(part.nbytes for part in pool.kv(0))
    assert stored == 11 * of_pages + (1 + (window_pages or 10)) * of_windows + 4 * of_slots


def test_what_was_never_written_is_no_number_where_that_is_asked() -> None:
    pool = RowPool([KEPT], PAGE, RowCounts(2), "cpu", poison=True)
    assert all(part.isnan().all() for part in pool.kv(0))
    assert not any(part.any() for part in RowPool([KEPT], PAGE, RowCounts(2), "cpu").kv(0))


def test_new_storage_is_another_generation() -> None:
    pool = RowPool([KEPT], PAGE, RowCounts(2), "cpu")
    before = pool.rows(0, "blocks")
    pool.replace_storage()
    assert pool.generation == 1 and pool.rows(0, "blocks").data_ptr() != before.data_ptr()


def test_windows_have_pages_of_their_own_unless_they_hold_a_whole_context() -> None:
    layers = [Layer(0), Layer(1)]
    page, window, ring = (row_bytes([KEPT] * 2, place, PAGE) for place in Place)
    assert geometry(layers, [], 17, PAGE, F32, cell_bytes) == Geometry(page, window, 16, ring=ring)
    assert geometry(layers, [], 16, PAGE, F32, cell_bytes) == Geometry(page + window, ring=ring)


def test_a_page_is_made_to_fit_all_ratios_and_one_that_does_not_is_refused() -> None:
    assert page_multiple([KEPT, {"open": KeptRows(8, F32, ratio=128)}]) == 128
    layers = [Layer()]
    assert [fitting_page_size(layers, None, size) for size in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert fitting_page_size(layers, 24, 16) == 24
    with pytest.raises(ConfigError, match="page_size is 12; wanted a multiple of 8, .* leave --page-size out"):
        fitting_page_size(layers, 12, 16)
    assert fitting_page_size([Attention(0, 4, 1, 8)], 12, 16) == 12
