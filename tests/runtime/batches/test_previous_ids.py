"""The tokens before each token, as models with embeddings of n-grams read them: from the step's own
ids, and from the history of the request slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglcore.runtime.buffer_registry import BufferRegistry, FillContext
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.registry_builders import (
    PreviousIds,
    build_decode_registry,
    build_prefill_registry,
    previous_buffer,
)
from sglcore.runtime.token_table import TokenTable
from tests.runtime.tiny import SHARED, STAGED, ints

SLOTS, CONTEXT, COUNT = 5, 16, 3
TEXTS = {slot: [10 * slot + place for place in range(CONTEXT)] for slot in range(1, SLOTS + 1)}
both = pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])
Rows = list[tuple[int, int, int]]
"""Slot, first position and number of tokens of each request."""


def expected(rows: Rows) -> list[list[int]]:
    """The ids before each token, by walking over the texts."""
    found = [TEXTS[slot][:place] for slot, first, count in rows for place in range(first, first + count)]
    return [(list(reversed(text)) + [-1] * COUNT)[:COUNT] for text in found]


def filled(registry: BufferRegistry, rows: Rows, is_decode: bool, padding: int = 0) -> list[list[int]]:
    """The field after a step with these rows, which is padded by so many tokens."""
    requests, tokens = len(rows), sum(count for _, _, count in rows)
    starts = [sum(count for _, _, count in rows[:row]) for row in range(requests)]
    given = {
        "req_pool_indices": [slot for slot, _, _ in rows],
        "seq_lens": [first + count for _, first, count in rows],
        "positions": [place for _, first, count in rows for place in range(first, first + count)],
        "input_ids": [TEXTS[slot][place] for slot, first, count in rows for place in range(first, first + count)],
    }
    if not is_decode:
        given |= {"extend_start_loc": starts, "extend_seq_lens": [count for _, _, count in rows]}
        given |= {"extend_prefix_lens": [first for _, first, _ in rows]}
    batch = registry.view(requests, tokens, not is_decode)
    for name, value in given.items():
        registry.stage(name, ints(value))
    registry.commit()
    registry.fill_from(batch, FillContext(requests, requests + padding, tokens, tokens + padding))
    info = registry.extract_buffer(batch, requests + padding, tokens + padding).ngram_embedding_info
    assert info is not None and info.previous_ids is not None
    assert info.previous_ids[tokens:].tolist() == [[0] * COUNT] * padding
    return info.previous_ids[:tokens].tolist()


def table_of(known: dict[int, int]) -> TokenTable:
    """The history of slots with so many known tokens; all others are wrong."""
    table = TokenTable(SLOTS, CONTEXT, "cpu")
    table.history.fill_(99)
    for slot, count in known.items():
        table.history[slot, :count] = torch.tensor(TEXTS[slot][:count], dtype=torch.int32)
    return table


CHUNKS: Rows = [(2, 0, 5), (4, 1, 1), (1, 7, 4), (3, 2, 2), (5, 0, 1)]


@both
@pytest.mark.parametrize("padding", [0, 2])
def test_chunks_read_their_own_ids_and_before_them_the_history(facts: Any, padding: int) -> None:
    table = table_of({slot: first for slot, first, _ in CHUNKS})
    registry = build_prefill_registry(
        facts, None, max_bs=8, max_num_tokens=32, extra_buffers=[previous_buffer(table, COUNT)]
    )
    assert filled(registry, CHUNKS, False, padding) == expected(CHUNKS)


@both
@pytest.mark.parametrize("padding", [0, 2])
def test_decode_rows_read_the_history_also_several_of_one_request(facts: Any, padding: int) -> None:
    rows: Rows = [(3, 0, 1), (1, 6, 1), (1, 7, 1), (1, 8, 1), (4, 2, 1)]
    table = table_of({1: 9, 4: 2})
    registry = build_decode_registry(facts, None, max_bs=8, extra_buffers=[previous_buffer(table, COUNT)])
    assert filled(registry, rows, True, padding) == expected(rows)


def wrong_start(self: PreviousIds, slots: Any, positions: Any, count: int) -> Any:
    """Mutant: the start of a text repeats its first token."""
    columns = positions.unsqueeze(1) - torch.arange(1, count + 1, dtype=positions.dtype)
    return self._history[slots.unsqueeze(1), columns.clamp(min=0)]


def one_off(self: PreviousIds, slots: Any, positions: Any, count: int) -> Any:
    """Mutant: the token itself is the first of those before it."""
    columns = positions.unsqueeze(1) - torch.arange(count, dtype=positions.dtype)
    return torch.where(columns < 0, -1, self._history[slots.unsqueeze(1), columns.clamp(min=0)])


def other_slot(self: PreviousIds, slots: Any, positions: Any, count: int) -> Any:
    """Mutant: every row has the slot of the first."""
    columns = positions.unsqueeze(1) - torch.arange(1, count + 1, dtype=positions.dtype)
    return torch.where(columns < 0, -1, self._history[slots[:1].unsqueeze(1), columns.clamp(min=0)])


@pytest.mark.parametrize("mutant", [wrong_start, one_off, other_slot])
def test_a_mutant_is_caught(mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreviousIds, "_before", mutant)
    with pytest.raises(AssertionError):
        test_chunks_read_their_own_ids_and_before_them_the_history(SHARED, 0)


def test_chunks_without_request_slots_read_their_own_ids_alone() -> None:
    table = table_of({})
    registry = build_prefill_registry(
        SHARED, None, max_bs=4, max_num_tokens=32, extra_buffers=[previous_buffer(table, COUNT)]
    )
    rows: Rows = [(2, 0, 5), (4, 0, 2)]
    assert filled(registry, rows, False) == expected(rows)


def test_a_step_without_rows_fills_nothing() -> None:
    registry = build_decode_registry(SHARED, None, max_bs=4, extra_buffers=[previous_buffer(table_of({}), COUNT)])
    batch: ForwardBatch = registry.view(0, 0, False)
    registry.fill_from(batch, FillContext(0, 2, 0, 2))
    info = registry.extract_buffer(batch, 2, 2).ngram_embedding_info
    assert info is not None and info.previous_ids is not None and info.previous_ids.tolist() == [[0] * COUNT] * 2
