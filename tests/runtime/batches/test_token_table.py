"""The token table of request slots: futures are resolved from it, and its history grows with each
token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglcore.runtime.token_table import TokenTable
from sglcore.step.tables import new_history
from tests.runtime.tiny import Desk, ints, offsets

SLOTS, CONTEXT = 5, 9


def table(kind: type[TokenTable] = TokenTable) -> TokenTable:
    """Slot s last drew token 40 + s."""
    made = kind(SLOTS, CONTEXT, "cpu")
    made.last[:] = torch.arange(40, 41 + SLOTS)
    return made


def resolved(ids: list[int], kind: type[TokenTable] = TokenTable) -> list[int]:
    """Input ids with their futures resolved in place."""
    tensor = torch.tensor(ids, dtype=torch.int32)
    table(kind).resolve_future(tensor)
    return tensor.tolist()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.integers(-SLOTS, -1), st.integers(0, 2**31 - 1)), max_size=8))
def test_a_negative_id_becomes_the_last_token_of_its_slot_and_others_stay(ids: list[int]) -> None:
    assert resolved(ids) == [40 - token if token < 0 else token for token in ids]


class OffByOne(TokenTable):
    """Mutant: the future of slot s is read at s - 1."""

    def resolve_future(self, input_ids: Tensor) -> None:
        """Read one row below the right one."""
        futures = self.last[(-input_ids - 1).clamp_(min=0)]
        torch.where(input_ids < 0, futures, input_ids, out=input_ids)


def test_a_table_that_is_read_one_row_off_is_caught() -> None:
    assert resolved([-3, 7], OffByOne) != [43, 7]


def test_futures_inside_a_larger_buffer_leave_the_rest_of_it_alone() -> None:
    buffer = torch.tensor([-1, 5, -2, -3, -4], dtype=torch.int32)
    table().resolve_future(buffer[1:3])
    assert buffer.tolist() == [-1, 5, 42, -3, -4]


def test_in_a_decode_every_row_brings_its_last_token() -> None:
    buffer = torch.full((4,), -9, dtype=torch.int32)
    table().resolve_decode(buffer[:3], torch.tensor([5, 1, 3], dtype=torch.int32))
    assert buffer.tolist() == [45, 41, 43, -9]
    table().resolve_decode(buffer[:0], torch.zeros(0, dtype=torch.int32))


def test_published_tokens_are_the_last_of_their_slots_only() -> None:
    made = table()
    made.publish(torch.tensor([4, 2]), torch.tensor([7, 8], dtype=torch.int32))
    assert made.last.tolist() == [40, 41, 8, 43, 7, 45]
    made.publish(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    assert made.last.tolist() == [40, 41, 8, 43, 7, 45]


def admitted(*rows: tuple[int, list[int]]) -> TokenTable:
    """A table after a batch in which slot s brought its history of tokens."""
    made = TokenTable(SLOTS, CONTEXT, "cpu")
    batch = Desk().extend({slot: [1] for slot, _ in rows})
    batch.history_offsets = offsets([len(tokens) for _, tokens in rows])
    batch.history_ids = ints([token for _, tokens in rows for token in tokens])
    found = new_history(batch)
    assert found is not None
    made.admit_history(*map(torch.from_numpy, found))
    return made


def test_history_that_comes_with_a_row_is_stored_from_the_start_of_its_slot() -> None:
    history = admitted((4, [7, 8, 9]), (2, []), (1, [5])).history
    assert history[4].tolist() == [7, 8, 9] + [0] * (CONTEXT - 2)
    assert history[1].tolist() == [5] + [0] * CONTEXT
    assert not history[[0, 2, 3, 5]].any()


def test_a_history_of_the_whole_context_and_one_token_more_fits() -> None:
    full = list(range(1, CONTEXT + 1))
    made = admitted((SLOTS, full))
    made.admit_history(torch.tensor([SLOTS]), torch.tensor([CONTEXT]), torch.tensor([99], dtype=torch.int32))
    assert made.history[SLOTS].tolist() == [*full, 99]
    assert not made.history[:SLOTS].any()


def test_appended_tokens_go_to_the_position_that_was_drawn() -> None:
    made = admitted((1, [5, 6]), (3, [7]))
    made.admit_history(torch.tensor([3, 1]), torch.tensor([1, 2]), torch.tensor([8, 9], dtype=torch.int32))
    assert made.history[1, :4].tolist() == [5, 6, 9, 0]
    assert made.history[3, :3].tolist() == [7, 8, 0]


def test_a_batch_without_history_makes_no_table() -> None:
    made = TokenTable(SLOTS, CONTEXT, "cpu")
    assert new_history(Desk().extend({1: [1]})) is None
    assert made._history is None


@pytest.mark.parametrize("slots", [[], [2]])
def test_history_is_as_wide_as_the_context_and_one_token(slots: list[int]) -> None:
    assert admitted(*((slot, []) for slot in slots)).history.shape == (SLOTS + 1, CONTEXT + 1)
