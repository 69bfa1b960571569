"""The sizes of a memory that both kinds of pages share, and how many more requests it holds than
separate pools of the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.cache.request_pages import Memory
from sglcore.schedule.request import Request
from sglcore.schedule.result_checks import check_limits
from sglcore.step.sizing import GIB, Geometry, MemoryBudget, MemorySizes, Sharing, size_pools, size_text
from sglcore.worker.model_worker import Limits

PAGE, PAGE_BYTES, CONTEXT, WINDOW, STEP = 16, 16 << 10, 160, 20, 24
LONGEST, LISTED = 10, 5
"""Pages of the longest request, and the most window pages of one."""


def with_shares(pages: float, windows: int = 1, full: int = 1, **wanted: Any) -> tuple[MemorySizes, dict[str, Any]]:
    """The sizes of a memory of `pages` pages, for a model with so many layers of each kind."""
    ledger, budget = DecisionLedger(), int(pages * PAGE_BYTES)
    unit = -(-windows // full)
    found = size_pools(
        EngineConfig(**{"max_requests": 4, "max_batch_tokens": STEP, **wanted}),
        context_len=CONTEXT,
        geometry=Geometry(PAGE_BYTES, PAGE_BYTES * windows // full, WINDOW),
        page_size=PAGE,
        budget=MemoryBudget(budget, budget, "measured", 1.0),
        ledger=ledger,
        sharing=Sharing(unit, f"{windows} and {full} layers", windows, full),
    )
    return found, {row.topic: row for row in ledger.rows}


def limits_of(sizes: MemorySizes, max_batch_tokens: int = STEP) -> Limits:
    return Limits(
        max_model_len=sizes.max_model_len,
        max_requests=sizes.max_requests,
        page_size=sizes.page_size,
        num_pages=sizes.num_pages,
        max_batch_tokens=max_batch_tokens,
        vocab_size=9,
        window=sizes.window,
        num_window_pages=sizes.num_window_pages,
        window_unit=sizes.window_unit,
        **sizes.num_bytes,
    )


def test_all_pages_are_of_one_size_and_the_ledger_says_what_a_split_would_be() -> None:
    found, rows = with_shares(60)
    assert found == MemorySizes(PAGE, 60, CONTEXT, 4, window=WINDOW, num_window_pages=60, window_unit=1)
    assert (found.num_bytes["kv_bytes"], found.num_bytes["window_bytes"]) == (60 * PAGE_BYTES, 0)
    assert (rows["kv memory"].requested, rows["kv memory"].effective) == ("auto", "shared")
    assert "split, there would be 30 pages and 30 window pages" in rows["kv memory"].reason
    assert rows["kv cache"].effective == f"60 pages of 16 tokens for all layers, {size_text(60 * PAGE_BYTES)}"
    assert "window cache" not in rows


def test_there_are_no_more_pages_than_all_requests_can_use() -> None:
    assert with_shares(1000)[0].num_pages == 4 * LONGEST + 34
    found, _ = with_shares(1000, windows=5)
    assert (found.window_unit, found.num_pages) == (5, 5 * (8 + 34 + LISTED + 1) - 1)


def test_a_block_has_as_many_pages_as_window_layers_for_each_full_one() -> None:
    found, rows = with_shares(100, windows=5, full=2)
    assert (found.window_unit, found.num_pages, found.num_window_pages) == (3, 98, 32)
    assert "a window page takes 3 of the pages, 17% of it unused" in rows["kv memory"].reason


def test_where_much_of_a_window_page_would_be_unused_pools_are_split_unless_requested() -> None:
    found, rows = with_shares(100, windows=2, full=3)
    assert found.window_unit == 0
    assert "shared pages would waste 33% of each window page" in rows["kv memory"].reason
    assert with_shares(100, windows=2, full=3, kv_memory="shared")[0].window_unit == 1
    assert with_shares(100, windows=3, full=4)[0].window_unit == 1


def test_a_request_of_full_length_fits_or_pools_are_split() -> None:
    for windows in (1, 4):
        least = -(-LONGEST // windows) * windows + LISTED * windows + windows - 1
        found, _ = with_shares(least, windows, kv_memory="shared")
        assert found.num_pages == least
        check_limits(limits_of(found))
        found, rows = with_shares(least - 1, windows)
        assert found.window_unit == 0 and f"its windows need {least}" in rows["kv memory"].reason
        with pytest.raises(ConfigError, match="one request of 160 tokens and its windows"):
            with_shares(least - 1, windows, kv_memory="shared")


def test_limits_that_hold_no_whole_request_are_refused() -> None:
    found, _ = with_shares(LONGEST + LISTED)
    with pytest.raises(ConfigError, match="needs 15"):
        check_limits(replace(limits_of(found), num_pages=14))


def test_fewer_requests_run_than_there_is_a_page_of_each_kind_for() -> None:
    found, rows = with_shares(LONGEST + LISTED, max_requests=9)
    assert (found.num_pages, found.max_requests) == (15, 7)
    assert "one page and one window page of 15 pages" in rows["requests"].reason


def test_prompts_in_slices_keep_the_split() -> None:
    found, rows = with_shares(60, prompt_slices="auto")
    assert found.window_unit == 0 and "not yet with --prompt-slices" in rows["kv memory"].reason
    with pytest.raises(ConfigError, match="kv_memory is shared; not yet with --prompt-slices"):
        with_shares(60, prompt_slices="8000", kv_memory="shared")


def test_what_is_requested_is_what_there_is() -> None:
    found, rows = with_shares(60, kv_memory="split")
    assert (found.window_unit, found.num_pages, found.num_window_pages) == (0, 30, 30)
    assert (rows["kv memory"].requested, rows["kv memory"].effective) == ("split", "split")
    with pytest.raises(ConfigError, match=r"kv_memory is shared; .* all pages are of one kind"):
        size_pools(
            EngineConfig(max_requests=4, kv_memory="shared"),
            context_len=CONTEXT,
            geometry=Geometry(PAGE_BYTES),
            page_size=PAGE,
            budget=MemoryBudget(GIB, GIB, "measured"),
            ledger=DecisionLedger(),
        )


@settings(deadline=None)
@given(st.integers(2, 300), st.integers(1, 9), st.integers(1, 4), st.integers(1, 6), st.integers(1, 100))
def test_what_is_shared_fits_and_holds_one_request(
    pages: int, windows: int, full: int, requests: int, step: int
) -> None:
    try:
        found, _ = with_shares(pages, windows, full, max_requests=requests, max_batch_tokens=step)
    except ConfigError:
        return
    if found.window_unit:
        assert found.num_pages <= pages and (found.num_pages + 1) % found.window_unit == 0
        check_limits(limits_of(found, step))


STEP_TOKENS, MANY = 2048, 2048
SHAPES = {
    "gpt-oss-20b": (12, 12, 8, 64, 128, 131072),
    "gemma-2-9b": (21, 21, 8, 256, 4096, 8192),
    "gemma-3-27b": (52, 10, 16, 128, 1024, 131072),
    "command-r7b": (24, 8, 8, 128, 4096, 131072),
}
"""Of published models: layers with windows and without, KV heads, head size, window, context."""


def held(sizes: MemorySizes, tokens: int) -> int:
    """How many requests of `tokens` tokens have all their pages at once."""
    memory, count = Memory(limits_of(sizes, STEP_TOKENS), prefix_cache=False), 0
    while count < sizes.max_requests:
        request = Request(f"r{count}", np.zeros(tokens, np.int32), SamplingParams(max_tokens=1))
        if not memory.admit(request, count, count):
            break
        for start in range(0, tokens, STEP_TOKENS):
            end = min(start + STEP_TOKENS, tokens)
            assert memory.grow(request, memory.pages_for(end) - len(request.held.pages))
            memory.windows.slide(request.held.windows, end)
        count += 1
    return count


def counts(name: str, tokens: int, page_size: int = 64) -> tuple[int, int]:
    """How many such requests separate pools hold, and a shared memory, in 20 GiB of bfloat16."""
    windows, full, heads, size, window, context = SHAPES[name]
    page = page_size * 2 * heads * size * 2
    found: list[int] = []
    for kv_memory in ("split", "shared"):
        sizes = size_pools(
            EngineConfig(max_requests=MANY, max_batch_tokens=STEP_TOKENS, kv_memory=kv_memory),
            context_len=context,
            geometry=Geometry(page * full, page * windows, window),
            page_size=page_size,
            budget=MemoryBudget(20 * GIB, 20 * GIB, "measured", 1.0),
            ledger=DecisionLedger(),
            sharing=Sharing(-(-windows // full), name, windows, full),
        )
        found.append(held(sizes, tokens))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("name", "tokens", "wanted"),
    [
        ("gpt-oss-20b", 32000, (13, 27)),
        ("gpt-oss-20b", 200, (1365, 1517)),
        ("gemma-2-9b", 7000, (8, 11)),
        ("gemma-2-9b", 200, (195, 195)),
        ("gemma-3-27b", 32000, (4, 6)),
        ("gemma-3-27b", 200, (78, 116)),
        ("command-r7b", 32000, (10, 14)),
        ("command-r7b", 200, (341, 512)),
    ],
)
def test_more_requests_run_at_once_with_long_and_with_short_texts(
    name: str, tokens: int, wanted: tuple[int, int]
) -> None:
    """The figures of docs/kv-cache.md. Short texts of a model with as many layers of each kind need
    as many pages of each: the split's halves are right for them."""
    assert counts(name, tokens) == wanted
