"""Layers with their own row formats in the KV cache: bytes per row, location of rows, and page
sizes that fit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglcore.checkpoint.compressed_config import CompressedConfig, Compression
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.device.facts import Facts
from sglcore.runtime.attention.layer import Attention
from sglcore.runtime.attention.sparse.token_queries import LOGITS, score_bytes
from sglcore.runtime.kernels.row_codec import E4M3FN, E4M3FNUZ, FLOATS, RowCodec
from sglcore.runtime.memory.deepseek_v4_rows import DeepSeekV4TokenToKVPool, kept_rows
from sglcore.runtime.memory.geometry import fitting_page_size, geometry, rows_row
from sglcore.runtime.memory.kv_rows import (
    KeptRows,
    Place,
    RowCounts,
    RowPool,
    check_row_dtype,
    page_multiple,
    row_bytes,
)
from sglcore.runtime.memory.make_pools import make_rows
from sglcore.runtime.memory.memory_bring_up import sizes
from sglcore.runtime.memory.pools import cell_bytes
from sglcore.step.sizing import GIB, Geometry, MemoryBudget, MemorySizes, size_text
from tests.runtime.sparse_tiny import net_of

F32, BF16 = torch.float32, torch.bfloat16
PAGE = 32
KEPT = {
    "window": KeptRows(8, BF16, Place.WINDOW_PAGES),
    "blocks": KeptRows(8, BF16, ratio=4),
    "recent": KeptRows(16, F32, Place.WINDOW_PAGES, ring=8),
    "open": KeptRows(16, F32, Place.SLOTS, ring=48),
}
PLACES = (Place.PAGES, Place.WINDOW_PAGES, Place.SLOTS)


class Layer(Attention):
    """A layer with its own rows."""

    def __init__(self, layer_id: int = 0, window: int | None = 16) -> None:
        super().__init__(layer_id, 4, 1, 8, sliding_window=window, cached=False)
        self.rows = KEPT


def test_rows_are_counted_by_tokens_or_by_page_and_slot() -> None:
    assert [each.count(PAGE) for each in KEPT.values()] == [32, 8, 8, 48]
    assert [row_bytes([KEPT, KEPT], place, PAGE) for place in PLACES] == [
        2 * 8 * 8 * 2,
        2 * (32 * 8 * 2 + 8 * 16 * 4),
        2 * 48 * 16 * 4,
    ]


@pytest.mark.parametrize("float8", FLOATS)
def test_with_a_codec_a_row_has_its_bytes(float8: str) -> None:
    codec = RowCodec(512, 64, float8=float8)
    kept = KeptRows(512, BF16, codec=codec)
    assert kept.num_bytes(PAGE) == PAGE * codec.num_bytes == PAGE * 584
    pool = RowPool([{"kv": kept}], PAGE, RowCounts(2), "cpu", poison=True)
    assert pool.rows(0, "kv").shape == (3 * PAGE, 584) and pool.rows(0, "kv").dtype == torch.uint8
    assert codec.decode(pool.rows(0, "kv")[:1]).isnan().all()
    assert pool.codec(0, "kv") is codec


@pytest.mark.parametrize("window_pages", [0, 5])
def test_a_pool_has_what_the_geometry_counts_and_what_is_nobodys(window_pages: int) -> None:
    pool = RowPool([KEPT], PAGE, RowCounts(10, window_pages, 3), "cpu")
    of_pages, of_slots = row_bytes([KEPT], Place.PAGES, PAGE), row_bytes([KEPT], Place.SLOTS, PAGE)
    of_windows = row_bytes([KEPT], Place.WINDOW_PAGES, PAGE)
    stored = sum(part.nbytes for part in pool.kv(0))
    assert stored == 11 * of_pages + (1 + (window_pages or 10)) * of_windows + 4 * of_slots


def test_rows_are_made_for_the_pages_and_requests_that_were_sized() -> None:
    sized = MemorySizes(PAGE, 10, 10 * PAGE, 3, window=16, num_window_pages=5)
    pool = make_rows([Layer()], sized, "cpu", True, None)
    page, window, ring = (row_bytes([KEPT], place, PAGE) for place in PLACES)
    assert sum(part.nbytes for part in pool.kv(0)) == 11 * page + 6 * window + 4 * ring
    assert all(part.isnan().all() for part in pool.kv(0))


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
    page, window, ring = (row_bytes([KEPT] * 2, place, PAGE) for place in PLACES)
    assert geometry(layers, [], 17, PAGE, F32, cell_bytes) == Geometry(page, window, 16, ring=ring)
    assert geometry(layers, [], 16, PAGE, F32, cell_bytes) == Geometry(page + window, ring=ring)


def test_a_page_is_made_to_fit_all_ratios_and_one_that_does_not_is_refused() -> None:
    assert page_multiple([KEPT, {"open": KeptRows(8, F32, ratio=128)}]) == 128
    layers = [Layer()]
    assert [fitting_page_size(layers, None, size) for size in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert fitting_page_size(layers, 24, 16) == 24
    with pytest.raises(ConfigError, match="page_size is 12; wanted a multiple of 8 tokens, .* leave --page-size out"):
        fitting_page_size(layers, 12, 16)
    assert fitting_page_size([Attention(0, 4, 1, 8)], 12, 16) == 12


KINDS = net_of([Compression(16, False)])


class Kept(Layer):
    """A layer with the rows of DeepSeek-V4's attention."""

    def __init__(self, net: CompressedConfig, compression: Compression | None, drafts: int, *asked: Any) -> None:
        super().__init__(window=net.window)
        self.rows = kept_rows(net, compression, BF16, drafts, *asked)


@pytest.mark.parametrize("drafts", [1, 4])
def test_deepseek_v4_takes_to_the_byte_what_its_layers_keep(drafts: int) -> None:
    """At the published sizes: rows of 512 and index keys of 128 elements of two bytes, states of
    four bytes."""
    sparse, heavy, size, index, page = Compression(4, True), Compression(128, False), 512, 128, 256
    kinds = [None, None, *(heavy, sparse) * 20, heavy]
    rings = (8, 128) if drafts == 1 else (16, 256)
    net = replace(net_of(kinds), head_dim=size, index_dim=index, window=128)
    layers = [Kept(net, each, drafts) for each in kinds]
    assert fitting_page_size(layers, None, 16) == 128
    found = geometry(layers, [], 4096, page, BF16, cell_bytes)
    every = 20 * 2 * (size + index) * page // 4 + 21 * 2 * size * page // 128
    window = 43 * 2 * size * page + 20 * rings[0] * 4 * (size + index) * 4
    assert found == Geometry(every, window, 128, ring=21 * rings[1] * 2 * size * 4)
    assert 1000 * every / page == 1000 * (20 * (2 * size + 2 * index) / 4 + 21 * 2 * size / 128)
    pool = DeepSeekV4TokenToKVPool([layer.rows for layer in layers], page, RowCounts(3, 2, 1), "meta")
    stored = sum(part.nbytes for layer in range(pool.num_layers) for part in pool.kv(layer))
    assert stored == 4 * every + 3 * window + 2 * found.ring


def test_in_eight_bits_a_row_of_the_published_sizes_takes_its_bytes() -> None:
    """A row of 512 elements, 64 of them rotary: 448 bytes, 128 for the rotary part, 7 scales and 1
    byte of alignment. An index key: 128 bytes, 2 scales and alignment. States keep their dtype."""
    kinds, page = [None, Compression(4, True), Compression(128, False)], 256
    net = replace(net_of(kinds), head_dim=512, rope_dim=64, index_dim=128, window=128)
    plain, small = ([kept_rows(net, each, BF16, kv_cache_dtype=asked) for each in kinds] for asked in ("auto", "fp8"))
    assert row_bytes(small, Place.PAGES, page) == (584 + 136) * page // 4 + 584 * page // 128
    states = row_bytes(plain, Place.WINDOW_PAGES, page) - 3 * 2 * 512 * page
    assert row_bytes(small, Place.WINDOW_PAGES, page) == 3 * 584 * page + states
    assert row_bytes(small, Place.SLOTS, page) == row_bytes(plain, Place.SLOTS, page)
    pool = DeepSeekV4TokenToKVPool(small, page, RowCounts(3, 2, 1), "meta")
    stored = sum(part.nbytes for layer in range(pool.num_layers) for part in pool.kv(layer))
    assert stored == sum(count * row_bytes(small, place, page) for place, count in zip(PLACES, (4, 3, 2), strict=True))


@pytest.mark.parametrize(("asked", "own", "found"), [(None, 24, 32), (None, 32, 32), (16, 24, 16)])
def test_a_start_says_which_pages_its_blocks_need_and_what_rows_take(asked: int | None, own: int, found: int) -> None:
    config, ledger = SimpleNamespace(context_length=4096, architecture="Toy"), DecisionLedger()
    model: Any = SimpleNamespace(
        attention_layers=[Kept(KINDS, KINDS.compressions[0], 1)], state_layers=[], dtype=F32, config=config
    )
    given = EngineConfig(page_size=asked, max_batch_tokens=64), Facts("cpu", page_size=own), model
    assert sizes(*given, MemoryBudget(GIB, GIB, "told"), ledger).page_size == found
    rows = {row.topic: row for row in ledger.rows}
    assert ("page size" in rows) == (asked is None and own != found) and "kv rows" in rows
    assert "page size" not in rows or (rows["page size"].effective, own) == (f"{found} tokens", 24)


def test_the_scores_of_the_longest_step_are_kept_free() -> None:
    """Memory for the index scores: blocks of the longest text x tokens of the step, at most
    `LOGITS` scores at a time; none without an indexer."""
    sparse, heavy = (Kept(net_of([each]), each, 1) for each in (Compression(4, True), Compression(16, False)))
    assert score_bytes([heavy], 64, 4096) == 0
    assert score_bytes([heavy, sparse], 64, 4096) == 64 * 1024 * 4
    assert score_bytes([sparse], 1 << 20, 4096) == LOGITS * 4
    config, ledger = SimpleNamespace(context_length=4096, architecture="Toy"), DecisionLedger()
    model: Any = SimpleNamespace(attention_layers=[sparse], state_layers=[], dtype=F32, config=config)
    given, free = EngineConfig(max_batch_tokens=64), 1 << 26
    asked = replace(given, kv_cache_memory=free - 64 * 1024 * 4 + 1)
    with pytest.raises(ConfigError, match="63.8 MiB are available"):
        sizes(asked, Facts("cpu"), model, MemoryBudget(GIB, free, "told"), ledger)
    verifying = replace(given, max_requests=32, speculative="ngram", draft_tokens=3)
    for asked, taken in ((given, "0.2 MiB"), (verifying, "0.5 MiB")):
        sizes(asked, Facts("cpu"), model, MemoryBudget(GIB, free, "told"), ledger := DecisionLedger())
        assert {row.topic: row.effective for row in ledger.rows}["index scores"] == taken


def test_the_ledger_has_rows_beside_keys_and_values_by_head() -> None:
    net, page = net_of([None, Compression(2, True)]), 16
    layers = [Kept(net, each, 1) for each in net.compressions]
    kept = Geometry(2048 * page, 1024 * page, 6, ring=1 << 20)
    row = rows_row(kept, layers, page, torch.float32)
    assert row.effective == "2.0 MiB for 1,000 tokens, 1.0 MiB for 1,000 in sliding windows, 1.0 MiB per request"
    assert row.reason == f"keys and values by head would be {size_text(1000 * 2 * 2 * 4 * 8 * 4)} for 1,000 tokens"
    small, other = (
        rows_row(kept, [Kept(net, None, 1, "fp8", False, float8)], page, torch.float32, "fp8")
        for float8 in (E4M3FN, E4M3FNUZ)
    )
    assert (small.requested, small.effective) == ("fp8", f"fp8, {row.effective}")
    assert "keys and values by head would be" in small.reason
    assert "(e4m3fn) with a scale" in small.reason and "(e4m3fnuz) with a scale" in other.reason


def test_a_type_that_rows_have_not_or_the_device_can_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("auto", "fp8"):
        check_row_dtype(asked, "cpu")
    with pytest.raises(
        ConfigError, match="kv_cache_dtype is 'int8', .* wanted auto or fp8; leave --kv-cache-dtype out"
    ):
        check_row_dtype("int8", "cpu")

    def unknown(codec: RowCodec, values: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Float8_e4m3fn is not supported")

    monkeypatch.setattr(RowCodec, "encode", unknown)
    check_row_dtype("auto", "cpu")
    with pytest.raises(
        ConfigError, match=r"this device does not support 8-bit floats \(e4m3fn\): Float8_e4m3fn is not supported"
    ):
        check_row_dtype("fp8", "cpu")
