"""Number of pages and context length, from free memory, the cost of a token, and the settings."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, StrictError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.memory.pools import MHATokenToKVPool, PageMajorTokenToKVPool, ReqToTokenPool, cell_bytes
from sglcore.step.sizing import GIB, Geometry, MemoryBudget, MemorySizes, size_pools, size_text
from tests.runtime.tiny import Desk

CELL, PAGE, CONTEXT = 1000, 16, 160
PAGE_BYTES = CELL * PAGE


def budget(pages: float, share: float = 1.0) -> MemoryBudget:
    """A budget that holds `pages` pages."""
    return MemoryBudget(100 * GIB, int(pages * PAGE_BYTES), "as the test says", share)


def sizes(available: float, *, strict: bool = False, share: float = 1.0, **wanted: Any) -> tuple[MemorySizes, Any]:
    """The sizes, and the ledger's rows by topic."""
    asked = MappingProxyType(dict.fromkeys(wanted, "argument"))
    config = EngineConfig(**{"max_requests": 4, **wanted}, sources=asked)
    ledger = DecisionLedger(strict=strict)
    found = size_pools(
        config,
        context_len=CONTEXT,
        geometry=Geometry(PAGE_BYTES),
        page_size=PAGE,
        budget=budget(available, share),
        ledger=ledger,
    )
    return found, {row.topic: row for row in ledger.rows}


def test_no_more_pages_are_made_than_all_requests_can_use() -> None:
    found, rows = sizes(1000)
    assert found == MemorySizes(PAGE, 4 * 10, CONTEXT, 4)
    assert list(rows) == ["kv cache"]
    assert rows["kv cache"].effective.startswith("40 pages of 16 tokens")
    assert "as the test says; 4 requests of 160 tokens need 40 pages" in rows["kv cache"].reason


def test_less_memory_makes_fewer_pages_and_the_same_context() -> None:
    found, rows = sizes(17.9)
    assert found == MemorySizes(PAGE, 17, CONTEXT, 4)
    assert list(rows) == ["kv cache"]


def test_only_the_packages_share_of_what_is_free_is_taken() -> None:
    assert sizes(40, share=0.5)[0].num_pages == 20


def test_a_context_that_no_one_asked_for_is_shortened_to_what_fits_and_the_ledger_says_so() -> None:
    found, rows = sizes(7.5, max_requests=2)
    assert found == MemorySizes(PAGE, 7, 7 * PAGE, 2)
    row = rows["context"]
    assert (row.requested, row.effective, row.downgrade) == ("160", "112", True)
    assert row.reason == "the KV memory holds 112 tokens"
    assert f"at least {10 * PAGE_BYTES} bytes" in row.remedy
    assert "2 requests of 112 tokens need 14 pages" in rows["kv cache"].reason


def test_with_strict_a_shorter_context_is_an_error() -> None:
    with pytest.raises(StrictError, match="context: found 112"):
        sizes(7.5, strict=True)
    sizes(10, strict=True)


def test_an_explicit_context_is_never_shortened() -> None:
    found, _ = sizes(10, max_model_len=CONTEXT)
    assert found.max_model_len == CONTEXT
    with pytest.raises(
        ConfigError, match=r"the KV memory holds 144 tokens, one request of 160 tokens needs .* lower max"
    ):
        sizes(9.9, max_model_len=CONTEXT)


def shortening_anyway(available: float, asked: int) -> int:
    """Mutant: shortens the context to what fits."""
    return min(asked, int(available) * PAGE)


def test_a_sizing_that_shortens_an_explicit_context_is_caught() -> None:
    assert shortening_anyway(9.9, CONTEXT) < CONTEXT


def test_an_explicit_context_that_needs_part_of_a_page_gets_the_whole_page() -> None:
    found, _ = sizes(1000, max_model_len=33)
    assert (found.max_model_len, found.num_pages) == (33, 4 * 3)


def test_an_explicit_cache_is_taken_whole_whatever_the_share() -> None:
    found, rows = sizes(40, share=0.1, kv_cache_memory=20 * PAGE_BYTES)
    assert found.num_pages == 20
    assert rows["kv cache"].requested == "0.3 MiB"


def with_fraction(fraction: float, **wanted: Any) -> tuple[int, str]:
    """The number of pages and the ledger's requested value, when 60 of 100 pages' memory are
    used."""
    ledger = DecisionLedger()
    config = EngineConfig(max_requests=8, memory_fraction=fraction, **wanted)
    given = MemoryBudget(100 * PAGE_BYTES, 40 * PAGE_BYTES, "as the test says", 0.1)
    found = size_pools(
        config, context_len=CONTEXT, geometry=Geometry(PAGE_BYTES), page_size=PAGE, budget=given, ledger=ledger
    )
    return found.num_pages, ledger.rows[-1].requested


def test_a_fraction_is_of_all_memory_and_counts_what_is_taken() -> None:
    assert with_fraction(0.9) == (30, "within 0.9 of all memory")
    assert with_fraction(0.9, kv_cache_memory=20 * PAGE_BYTES) == (20, "0.3 MiB")
    with pytest.raises(ConfigError, match="one request"):
        with_fraction(0.5, max_model_len=CONTEXT)
    with pytest.raises(ConfigError, match="memory_fraction is 90.0; it must be at most 1"):
        with_fraction(90.0)


def test_an_explicit_cache_beyond_what_is_free_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory is .* MiB, .* MiB are available; lower it"):
        sizes(10, kv_cache_memory=11 * PAGE_BYTES)


def test_memory_for_not_even_one_page_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the KV memory holds 0 tokens"):
        sizes(0.9)
    with pytest.raises(ConfigError, match="the KV memory holds 0 tokens"):
        sizes(5, kv_cache_memory=PAGE_BYTES - 1)


def test_no_more_requests_run_than_there_are_pages_and_the_ledger_says_so() -> None:
    found, rows = sizes(12, max_requests=50)
    assert (found.num_pages, found.max_requests) == (12, 12)
    row = rows["requests"]
    assert (row.requested, row.effective, row.downgrade) == ("50", "12", True)
    with pytest.raises(StrictError, match="requests: found 12"):
        sizes(12, max_requests=50, strict=True)


def test_as_many_requests_as_pages_are_what_was_asked_for() -> None:
    found, rows = sizes(4, max_model_len=4 * PAGE)
    assert (found.num_pages, found.max_requests, list(rows)) == (4, 4, ["kv cache"])


@pytest.mark.parametrize(("count", "text"), [(GIB, "1.00 GiB"), (GIB - (1 << 20), "1023.0 MiB"), (0, "0.0 MiB")])
def test_sizes_are_said_in_the_unit_that_they_reach(count: int, text: str) -> None:
    assert size_text(count) == text


def test_a_cell_of_one_byte_costs_one_byte() -> None:
    config = EngineConfig(max_requests=4, kv_cache_memory=20 * PAGE)
    options = {"context_len": CONTEXT, "geometry": Geometry(PAGE), "page_size": PAGE}
    assert size_pools(config, **options, budget=budget(10), ledger=DecisionLedger()).num_pages == 20


def test_memory_for_one_token_is_a_context_of_one_token() -> None:
    config, free = EngineConfig(max_requests=4), MemoryBudget(GIB, CELL, "", 1.0)
    options = {"context_len": CONTEXT, "geometry": Geometry(CELL), "page_size": 1}
    assert size_pools(config, **options, budget=free, ledger=DecisionLedger()) == MemorySizes(1, 1, 1, 1)


def test_fewer_requests_than_the_default_are_no_downgrade() -> None:
    ledger = DecisionLedger(strict=True)
    options = {"context_len": CONTEXT, "geometry": Geometry(PAGE_BYTES), "page_size": PAGE}
    found = size_pools(EngineConfig(), **options, budget=budget(12), ledger=ledger)
    assert found.max_requests == 12
    assert [(row.topic, row.downgrade) for row in ledger.rows] == [("kv cache", False), ("requests", False)]


def test_a_model_without_a_cache_needs_no_memory_to_speak_of() -> None:
    ledger = DecisionLedger(strict=True)
    found = size_pools(
        EngineConfig(max_requests=4),
        context_len=CONTEXT,
        geometry=Geometry(0),
        page_size=PAGE,
        budget=MemoryBudget(GIB, GIB, ""),
        ledger=ledger,
    )
    assert found == MemorySizes(PAGE, 40, CONTEXT, 4)


@settings(deadline=None)
@given(
    st.floats(0, 60),
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, CONTEXT)),
    st.floats(0.1, 1),
)
def test_one_request_of_the_whole_context_always_fits_into_what_was_allowed(
    available: float, max_requests: int, asked: int | None, share: float
) -> None:
    wanted: dict[str, Any] = {"max_requests": max_requests} | ({} if asked is None else {"max_model_len": asked})
    try:
        found, _ = sizes(available, share=share, **wanted)
    except ConfigError:
        assert available * share < -(-(asked or 1) // PAGE)
        return
    assert found.num_pages * PAGE >= found.max_model_len
    assert found.num_pages <= available * share
    assert found.max_model_len == asked if asked else found.max_model_len <= CONTEXT
    assert 1 <= found.max_requests <= min(max_requests, found.num_pages)


# -- the pools that are made with these sizes
# --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MHATokenToKVPool, PageMajorTokenToKVPool])
def test_a_cell_costs_keys_and_values_of_every_layer(kind: type[MHATokenToKVPool]) -> None:
    assert cell_bytes(((2, 8), (1, 16)), torch.bfloat16) == 2 * (16 + 16) * 2
    pool = kind(3, 4, ((2, 8), (1, 16)), torch.bfloat16, "cpu")
    stored = sum(part.nbytes for layer in (0, 1) for part in pool.kv(layer))
    assert stored == pool.num_cells * cell_bytes(((2, 8), (1, 16)), torch.bfloat16)
    assert pool.num_cells == (3 + 1) * 4


def test_new_storage_is_another_generation_at_other_addresses() -> None:
    pool = MHATokenToKVPool(3, 4, ((1, 4),), torch.float32, "cpu")
    before = pool.kv(0)
    pool.replace_storage()
    assert pool.generation == 1
    assert all(one.data_ptr() != other.data_ptr() for one, other in zip(before, pool.kv(0), strict=True))


def test_page_table_differences_are_appended_row_by_row() -> None:
    table, desk = ReqToTokenPool(8, 40, 4, "cpu"), Desk()
    for rows in ({2: [1] * 5, 7: [1] * 3}, {7: [1] * 2, 3: [1], 2: [1] * 8}, {3: [1]}):
        found = table.changes(desk.extend(rows))
        table.apply({name: torch.from_numpy(values) for name, values in found.items()})
    for slot in range(9):
        pages = desk.pages.get(slot, [])
        assert table.page_table[slot].tolist() == pages + [0] * (table.max_pages - len(pages))


def last_page_fits(kind: type[ReqToTokenPool]) -> bool:
    """The invariant: a slot holds the pages of a whole context and of the token sampled after it,
    and no more."""
    for pages in (4, 5):
        table, desk = kind(2, 12, 4, "cpu"), Desk()
        try:
            found = table.changes(desk.extend({1: [1] * (4 * pages)}))
        except ValueError:
            return pages == 5
        if found["page_entries"].tolist() != [table.max_pages + column for column in range(pages)]:
            return False
    return False


class OnePageShort(ReqToTokenPool):
    """Refuses the page of the last token."""

    def __init__(self, max_requests: int, max_model_len: int, page_size: int, device: str) -> None:
        super().__init__(max_requests, max_model_len, page_size, device)
        self.max_pages -= 1


def test_the_page_of_the_last_token_fits_and_a_table_without_it_is_caught() -> None:
    assert last_page_fits(ReqToTokenPool) and not last_page_fits(OnePageShort)


STATE = 10 * PAGE_BYTES
"""Bytes of a request's state: ten pages."""


def with_states(pages: float, strict: bool = False, **wanted: Any) -> tuple[MemorySizes, Any]:
    """The same for a model with recurrent states."""
    asked = MappingProxyType(dict.fromkeys(wanted, "argument"))
    ledger = DecisionLedger(strict=strict)
    found = size_pools(
        EngineConfig(**{"max_requests": 4, **wanted}, sources=asked),
        context_len=CONTEXT,
        geometry=Geometry(PAGE_BYTES, state=STATE),
        page_size=PAGE,
        budget=budget(pages),
        ledger=ledger,
    )
    return found, {row.topic: row for row in ledger.rows}


def test_states_of_all_requests_and_one_for_padding_come_before_snapshots_and_those_before_pages() -> None:
    found, rows = with_states(180)
    assert found == MemorySizes(PAGE, 40, CONTEXT, 4, num_snapshots=1)
    assert rows["states"].effective == f"{size_text(STATE)} per request, {size_text(5 * STATE)} for 4"
    assert rows["snapshots"].effective == f"1 of {size_text(STATE)}, {size_text(STATE)}"
    assert with_states(2000)[0].num_snapshots == 16, "no more than four for each request"


def test_bytes_of_each_kind_are_those_that_were_sized() -> None:
    found, _ = with_states(180)
    kinds = {
        "kv_bytes": 40 * PAGE_BYTES,
        "window_bytes": 0,
        "state_bytes": 5 * STATE,
        "snapshot_bytes": STATE,
        "host_bytes": 0,
    }
    assert found.num_bytes == kinds
    two = {
        "kv_bytes": 30 * PAGE_BYTES,
        "window_bytes": 30 * PAGE_BYTES,
        "state_bytes": 0,
        "snapshot_bytes": 0,
        "host_bytes": 0,
    }
    assert with_windows(60)[0].num_bytes == two
    assert with_windows(8)[0].num_bytes == {**two, "kv_bytes": 2 * 4 * PAGE_BYTES, "window_bytes": 0}


RING = 5 * PAGE_BYTES


def with_rings(pages: float, state: int = 0, **wanted: Any) -> tuple[MemorySizes, Any]:
    """The same for a model with rings per request, which have no snapshots; `state` adds recurrent
    states."""
    ledger = DecisionLedger()
    found = size_pools(
        EngineConfig(**{"max_requests": 4, **wanted}),
        context_len=CONTEXT,
        geometry=Geometry(PAGE_BYTES, state=state, ring=RING),
        page_size=PAGE,
        budget=budget(pages),
        ledger=ledger,
    )
    return found, {row.topic: row for row in ledger.rows}


def test_rings_of_all_requests_and_one_for_padding_come_before_pages_and_have_no_snapshots() -> None:
    found, rows = with_rings(60)
    assert found == MemorySizes(PAGE, 35, CONTEXT, 4)
    assert rows["states"].effective == f"{size_text(RING)} per request, {size_text(5 * RING)} for 4"
    assert "snapshots" not in rows
    kinds = {
        "kv_bytes": 35 * PAGE_BYTES,
        "window_bytes": 0,
        "state_bytes": 5 * RING,
        "snapshot_bytes": 0,
        "host_bytes": 0,
    }
    assert found.num_bytes == kinds
    both, _ = with_rings(300, state=STATE)
    assert (both.num_snapshots, both.num_pages) == (1, 40)
    assert both.num_bytes["state_bytes"] == 5 * (STATE + RING) and both.num_bytes["snapshot_bytes"] == STATE


def test_states_leave_half_of_the_memory_to_pages_and_fewer_requests_run_where_they_do_not_fit() -> None:
    found, rows = with_states(70)
    assert found == MemorySizes(PAGE, 20, CONTEXT, 2, num_snapshots=0)
    assert (rows["requests"].effective, rows["requests"].downgrade) == ("2", False)
    assert "states and one for padding" in rows["requests"].reason
    with pytest.raises(StrictError, match="hold 2 states and one for padding"):
        with_states(70, strict=True, max_requests=4)
    with pytest.raises(ConfigError, match="the state of one request takes 0.2 MiB, and padding needs one more"):
        with_states(38)


def test_memory_that_was_asked_for_pages_is_theirs_and_states_have_the_rest() -> None:
    found, _ = with_states(100, kv_cache_memory=20 * PAGE_BYTES)
    assert found == MemorySizes(PAGE, 20, CONTEXT, 4, num_snapshots=0)
    assert with_states(110, kv_cache_memory=20 * PAGE_BYTES)[0].num_snapshots == 1


def test_snapshots_take_what_was_asked_for_them_or_none_without_a_prefix_cache() -> None:
    assert with_states(500, snapshot_memory=7 * STATE + 1)[0].num_snapshots == 7
    assert with_states(500, snapshot_memory=0)[0].num_snapshots == 0
    found, rows = with_states(500, prefix_cache=False)
    assert found.num_snapshots == 0 and rows["snapshots"].reason == "the prefix cache is off"
    with pytest.raises(ConfigError, match="snapshot_memory is 30.5 MiB, .* left after the states of 4 requests"):
        with_states(500, snapshot_memory=200 * STATE)


def test_a_model_without_attention_has_as_many_pages_as_its_requests_can_use() -> None:
    found = size_pools(
        EngineConfig(max_requests=4),
        context_len=CONTEXT,
        geometry=Geometry(0, state=STATE),
        page_size=PAGE,
        budget=budget(500),
        ledger=DecisionLedger(),
    )
    assert (found.num_pages, found.max_requests) == (40, 4)


WINDOW, STEP = 20, 24
LEAST = 5
"""The least window pages of one request: pages for 44 tokens, and two more."""


def with_windows(pages: float, cell: int = CELL, **wanted: Any) -> tuple[MemorySizes, Any]:
    """The same for a model that keeps `cell` bytes of every token and CELL bytes of each of the
    last 20."""
    ledger = DecisionLedger()
    found = size_pools(
        EngineConfig(**{"max_requests": 4, "max_batch_tokens": STEP, **wanted}),
        context_len=CONTEXT,
        geometry=Geometry(PAGE * cell, PAGE_BYTES, WINDOW),
        page_size=PAGE,
        budget=budget(pages),
        ledger=ledger,
    )
    return found, {row.topic: row for row in ledger.rows}


def test_windows_of_all_requests_and_as_many_cached_ones_come_before_pages() -> None:
    found, rows = with_windows(1000)
    assert (found.num_pages, found.window, found.num_window_pages) == (40, WINDOW, 4 * 2 * 4 + 2)
    assert rows["window cache"].effective == f"34 pages of 16 tokens, {size_text(34 * PAGE_BYTES)}"
    assert (
        "of 4 requests and of 4 texts in the prefix cache, and the tokens of one step, need 34"
        in rows["window cache"].reason
    )
    assert with_windows(1000, prefix_cache=False)[0].num_window_pages == 4 * 4 + 2
    assert with_windows(1000, max_batch_tokens=130)[0].num_window_pages == 40, "there are no more pages than that"


def test_windows_leave_half_of_the_memory_to_pages_and_are_no_more_than_those() -> None:
    assert with_windows(60)[0] == MemorySizes(PAGE, 30, CONTEXT, 4, window=WINDOW, num_window_pages=30)
    thin, _ = with_windows(60, cell=CELL // 4)
    assert (thin.num_window_pages, thin.num_pages) == (30, 40)
    thick, _ = with_windows(100, cell=4 * CELL)
    assert (thick.num_window_pages, thick.num_pages) == (20, 20)


def test_a_model_of_windows_alone_has_names_of_pages_for_nothing() -> None:
    found, rows = with_windows(20, cell=0)
    assert (found.num_window_pages, found.num_pages, found.max_model_len) == (20, 40, CONTEXT)
    assert rows["kv cache"].effective == "40 pages of 16 tokens, 0.0 MiB"
    assert with_windows(LEAST, cell=0)[0] == MemorySizes(PAGE, 40, CONTEXT, 4, window=WINDOW, num_window_pages=LEAST)
    assert with_windows(LEAST - 1, cell=0)[0].num_window_pages == 0


def test_one_request_has_its_window_though_it_is_more_than_half() -> None:
    found, _ = with_windows(4 + LEAST, max_model_len=64)
    assert (found.num_pages, found.num_window_pages) == (4, LEAST)


def test_a_whole_context_fits_before_windows_take_half() -> None:
    assert with_windows(16)[0] == MemorySizes(PAGE, 10, CONTEXT, 4, window=WINDOW, num_window_pages=6)


def test_where_one_pool_holds_a_longer_context_there_is_one() -> None:
    found, rows = with_windows(8)
    assert found == MemorySizes(PAGE, 4, 4 * PAGE, 4)
    assert rows["window cache"].effective == "none" and "a longer context" in rows["window cache"].reason
    found, rows = with_windows(12)
    assert found == MemorySizes(PAGE, 7, 7 * PAGE, 4, window=WINDOW, num_window_pages=LEAST)
    with pytest.raises(ConfigError, match="the KV memory holds 64 tokens"):
        with_windows(8, max_model_len=CONTEXT)


@settings(deadline=None)
@given(st.integers(2, 300), st.sampled_from([0, 300, CELL, 4000]), st.integers(1, 6), st.integers(1, 100))
def test_both_pools_fit_and_hold_one_request(pages: int, cell: int, requests: int, step: int) -> None:
    try:
        found, _ = with_windows(pages, cell, max_requests=requests, max_batch_tokens=step)
    except ConfigError:
        assert pages * PAGE_BYTES < PAGE * (cell + CELL)
        return
    taken = found.num_window_pages * CELL + found.num_pages * (cell if found.window else cell + CELL)
    assert taken * PAGE <= pages * PAGE_BYTES
    assert found.num_pages * PAGE >= found.max_model_len
    assert not found.window or found.num_window_pages >= -(-(WINDOW + step) // PAGE) + 2
