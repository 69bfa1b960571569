"""From a ScheduleBatch to a ForwardBatch: every mode, one-shot values, futures, and the isolation
of the data that a forward sees."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.schedule.steps_in_flight import overlap_forward_isolation
from sglcore.worker.schedule_batch import CaptureHiddenMode, ForwardMode, OneShot, ScheduleBatch
from tests.runtime.tiny import PAGE, SHARED, STAGED, Desk, Site, ints, make_site, offsets

FIRST, SECOND = [5, 6, 7, 8, 9], [11, 12]
facts_of_both = pytest.mark.parametrize("facts", [SHARED, STAGED], ids=["shared", "staged"])


def staged(site: Site, batch: ScheduleBatch) -> ForwardBatch:
    """The batch on the device, with its locations computed."""
    made = site.runner.init_batch(batch)
    site.runner.prepared(made)
    return made


def values(*tensors: Tensor | None) -> list[Any]:
    """The tensors as lists."""
    return [None if tensor is None else tensor.tolist() for tensor in tensors]


def cells(desk: Desk, slot: int, start: int, end: int) -> list[int]:
    """The KV cells of the tokens start..end-1 of a slot, computed by hand."""
    return [desk.pages[slot][position // PAGE] * PAGE + position % PAGE for position in range(start, end)]


@facts_of_both
def test_an_extend_batch_has_the_rows_tokens_positions_lengths_and_cells(facts: Any) -> None:
    site, desk = make_site(facts=facts), Desk()
    staged(site, desk.extend({3: FIRST[:2]}))
    batch = staged(site, desk.extend({2: SECOND, 3: FIRST[2:]}))
    assert (batch.forward_mode, batch.batch_size, batch.num_tokens) == (ForwardMode.EXTEND, 2, 5)
    assert values(batch.input_ids, batch.positions) == [[11, 12, 7, 8, 9], [0, 1, 2, 3, 4]]
    assert values(batch.req_pool_indices, batch.seq_lens) == [[2, 3], [2, 5]]
    assert values(batch.extend_prefix_lens, batch.extend_seq_lens, batch.extend_start_loc) == [[0, 2], [2, 3], [0, 2]]
    assert values(batch.out_cache_loc, batch.num_token_non_padded) == [cells(desk, 2, 0, 2) + cells(desk, 3, 2, 5), [5]]
    assert batch.seq_lens_cpu is not None and batch.extend_seq_lens_cpu is not None
    assert (batch.seq_lens_cpu.tolist(), batch.extend_seq_lens_cpu.tolist()) == ([2, 5], [2, 3])
    assert batch.plan_record is None


@facts_of_both
def test_a_decode_batch_has_the_last_tokens_and_no_extend_fields(facts: Any) -> None:
    site, desk = make_site(facts=facts), Desk()
    staged(site, desk.extend({2: SECOND, 3: FIRST}))
    site.tokens.last[:] = torch.arange(20, 20 + len(site.tokens.last))
    batch = staged(site, desk.decode(3, 2))
    assert (batch.forward_mode, batch.batch_size, batch.num_tokens) == (ForwardMode.DECODE, 2, 2)
    assert values(batch.input_ids, batch.positions, batch.seq_lens) == [[23, 22], [5, 2], [6, 3]]
    assert values(batch.out_cache_loc) == [cells(desk, 3, 5, 6) + cells(desk, 2, 2, 3)]
    assert values(batch.extend_prefix_lens, batch.extend_seq_lens, batch.extend_start_loc) == [None] * 3
    assert batch.extend_seq_lens_cpu is None
    assert (batch.mrope_positions, batch.ngram_embedding_info, batch.input_embeds) == (None, None, None)


@facts_of_both
def test_a_mixed_batch_takes_the_last_token_where_the_id_is_minus_the_slot(facts: Any) -> None:
    site, desk = make_site(facts=facts), Desk()
    staged(site, desk.extend({1: FIRST, 4: FIRST}))
    site.tokens.last[:] = torch.arange(20, 20 + len(site.tokens.last))
    batch = staged(site, desk.batch({4: [-4], 1: [17], 2: SECOND}, ForwardMode.MIXED))
    assert values(batch.input_ids, batch.positions) == [[24, 17, 11, 12], [5, 5, 0, 1]]
    assert values(batch.seq_lens, batch.extend_seq_lens) == [[6, 6, 2], [1, 1, 2]]
    assert values(batch.out_cache_loc) == [cells(desk, 4, 5, 6) + cells(desk, 1, 5, 6) + cells(desk, 2, 0, 2)]


def test_a_continued_prompt_of_one_token_is_not_a_decode() -> None:
    site, desk = make_site(), Desk()
    staged(site, desk.extend({1: FIRST[:4]}))
    site.tokens.last[1] = 28
    batch = staged(site, desk.extend({1: FIRST[4:]}))
    assert values(batch.input_ids, batch.extend_seq_lens) == [[9], [1]]
    assert batch.forward_mode is ForwardMode.EXTEND


@facts_of_both
def test_positions_of_three_axes_are_staged_when_they_are_there(facts: Any) -> None:
    site, desk = make_site(facts=facts), Desk()
    rotary = np.arange(15, dtype=np.int32).reshape(3, 5)
    batch = staged(site, desk.extend({1: SECOND, 2: FIRST[:3]}, mrope_positions=rotary))
    assert values(batch.mrope_positions) == [rotary.tolist()]
    assert staged(site, desk.extend({1: SECOND})).mrope_positions is None


def one_shots(site: Site, batch: ScheduleBatch) -> tuple[Any, ...]:
    """The one-shot values that a forward batch made from `batch` sees."""
    made = ForwardBatch.init_new(batch, site.runner.registry_for(batch))
    assert made.seq_lens_cpu is not None
    lengths = made.seq_lens.tolist()
    assert lengths == made.seq_lens_cpu.tolist()
    return made.capture_hidden_mode, made.return_hidden_states_before_norm, lengths


def loaded_batch(shot: type[OneShot] = OneShot) -> tuple[Site, ScheduleBatch]:
    """A batch with all its one-shot values set."""
    site, desk = make_site(), Desk()
    batch = desk.extend(
        {1: FIRST},
        capture_hidden_mode=shot(CaptureHiddenMode.NONE),
        return_hidden_states_before_norm=shot(False),
        seq_lens_cpu_cache=shot(None),
    )
    batch.capture_hidden_mode.put(CaptureHiddenMode.FULL)
    batch.return_hidden_states_before_norm.put(True)
    batch.seq_lens_cpu_cache.put(ints([8]))
    return site, batch


def test_a_batch_that_has_no_room_keeps_its_one_shot_values() -> None:
    site, batch = loaded_batch()
    registry = site.runner.registry_for(batch)
    registry.freeze()
    registry.max_num_tokens = batch.num_tokens - 1
    with pytest.raises(ValueError, match="captured graphs hold addresses of"):
        ForwardBatch.init_new(batch, registry)
    assert batch.capture_hidden_mode.is_set and batch.seq_lens_cpu_cache.is_set


def test_one_shot_values_are_seen_by_the_first_forward_only() -> None:
    site, batch = loaded_batch()
    assert one_shots(site, batch) == (CaptureHiddenMode.FULL, True, [8])
    assert one_shots(site, batch) == (CaptureHiddenMode.NONE, False, [5])


class Peeking(OneShot):
    """Mutant: reading does not take the value."""

    def take(self) -> Any:
        """Return the value without removing it."""
        return self._value


def test_a_one_shot_that_is_only_peeked_at_is_caught() -> None:
    site, batch = loaded_batch(Peeking)
    one_shots(site, batch)
    assert one_shots(site, batch) != (CaptureHiddenMode.NONE, False, [5])


def test_lengths_given_for_one_decode_override_the_schedulers() -> None:
    site, desk = make_site(), Desk()
    staged(site, desk.extend({1: FIRST, 2: SECOND}))
    batch = desk.decode(1, 2)
    batch.seq_lens_cpu_cache.put(ints([4, 2]))
    made = ForwardBatch.init_new(batch, site.runner.decode_registry)
    assert values(made.seq_lens, made.positions) == [[4, 2], [3, 1]]


# -- isolation
# --------------------------------------------------------------------------------------------------


@dataclass
class Sampling:
    """Sampling state that knows whether it is a copy."""

    is_copy: bool = False

    def copy_for_forward(self) -> Sampling:
        """A copy."""
        return Sampling(True)


def full_batch(kind: type[ScheduleBatch] = ScheduleBatch, **values: Any) -> ScheduleBatch:
    """A batch with a value in every field."""
    arrays = {
        item.name: ints([1, 2, 3])
        for item in fields(ScheduleBatch)
        if item.name not in ("step", "forward_mode", "composition", "sampling", "emits")
        and "OneShot" not in str(item.type)
    }
    batch = kind(
        step=7, forward_mode=ForwardMode.MIXED, composition=3, emits=np.ones(3, dtype=bool), **arrays, **values
    )
    batch.sampling = Sampling()
    batch.capture_hidden_mode.put(CaptureHiddenMode.LAST)
    batch.seq_lens_cpu_cache.put(ints([4]))
    batch.return_hidden_states_before_norm.put(True)
    return batch


def shared_fields(mine: ScheduleBatch, view: ScheduleBatch) -> list[str]:
    """Fields of a copy that differ from the original, or that a later change of the original would
    change."""
    wrong = []
    for item in fields(mine):
        one, other = getattr(mine, item.name), getattr(view, item.name)
        if isinstance(one, np.ndarray):
            if not np.array_equal(one, other) or np.shares_memory(one, other):
                wrong.append(item.name)
        elif isinstance(one, (OneShot, Sampling)):
            if one is other:
                wrong.append(item.name)
        elif one != other:
            wrong.append(item.name)
    return wrong


def test_the_copy_for_a_forward_holds_every_field_and_shares_none() -> None:
    batch = full_batch()
    view = batch.copy_for_forward()
    assert shared_fields(batch, view) == []
    assert view.sampling == Sampling(is_copy=True)


def test_a_hand_written_copy_is_caught() -> None:
    batch = full_batch()
    short = {name: getattr(batch, name).copy() for name in ("slots", "seq_lens", "prefix_lens", "token_offsets")}
    rest = ("input_ids", "page_counts", "new_page_offsets", "new_pages", "emits")
    view = ScheduleBatch(7, ForwardMode.MIXED, **short, **{name: getattr(batch, name) for name in rest})  # mutant
    assert {"input_ids", "next_ids", "mrope_positions", "composition"} <= set(shared_fields(batch, view))


def test_one_shot_values_move_to_the_copy_and_come_back_if_the_forward_fails() -> None:
    batch = full_batch()
    with pytest.raises(RuntimeError, match="no memory"), overlap_forward_isolation(batch) as view:
        assert not batch.capture_hidden_mode.is_set
        assert view.capture_hidden_mode.is_set
        assert view.return_hidden_states_before_norm.take() is True
        raise RuntimeError("no memory")
    assert batch.capture_hidden_mode.take() is CaptureHiddenMode.LAST
    lengths = batch.seq_lens_cpu_cache.take()
    assert lengths is not None and lengths.tolist() == [4]
    assert batch.return_hidden_states_before_norm.take() is False


def test_a_forward_that_succeeds_gives_nothing_back() -> None:
    batch = full_batch()
    with overlap_forward_isolation(batch) as view:
        view.seq_lens[:] = 0
        view.sampling = None
    assert not batch.capture_hidden_mode.is_set
    assert batch.seq_lens.tolist() == [1, 2, 3]
    assert batch.sampling == Sampling()


def test_a_batch_takes_no_undeclared_attribute() -> None:
    with pytest.raises(AttributeError):
        full_batch().tree_cache = None  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(slots=True)
class Wider(ScheduleBatch):
    """A batch of a later version."""

    extra: Any = None


def test_a_value_of_a_kind_that_nobody_thought_about_is_an_error() -> None:
    batch = full_batch()
    batch.next_ids = [1, 2, 3]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match="copy_for_forward"):
        batch.copy_for_forward()


def test_the_copy_of_a_wider_batch_is_complete_too() -> None:
    batch = full_batch(Wider, extra=ints([1]))
    view = batch.copy_for_forward()
    assert isinstance(view, Wider)
    assert shared_fields(batch, view) == []


def test_a_new_field_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(AttributeError, match="copy_for_forward"):
        full_batch(Wider, extra=[1, 2]).copy_for_forward()


def test_an_empty_batch_stages() -> None:
    site, desk = make_site(), Desk()
    batch = staged(site, desk.extend({}))
    assert values(batch.input_ids, batch.seq_lens, batch.num_token_non_padded) == [[], [], [0]]
    assert offsets([]).tolist() == [0]
