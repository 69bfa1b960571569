"""SamplingBatch: one declaration defines selection, appending and the copy for a forward."""

import pickle
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from sglcore.sampling import noise
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch, SamplingNeeds, SamplingRow

KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.1),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.02, logit_bias={4: 1.5, 2: -100}),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, logprobs=3),
    SamplingParams(min_tokens=5, logit_bias={9: 2.0}),
)


def make_rows(count, start=0):
    return [SamplingRow(KINDS[i % 5], 2**63 + i, i % 3, 10 + i, (0, 1)) for i in range(start, start + count)]


def assert_equal(left, right):
    for item in fields(SamplingBatch):
        a, b = getattr(left, item.name), getattr(right, item.name)
        assert a.dtype == b.dtype == item.metadata["dtype"] and np.array_equal(a, b), item.name


def test_append_equals_building_at_once():
    whole = SamplingBatch.from_rows(make_rows(13))
    assert_equal(SamplingBatch.from_rows(make_rows(6)).append(make_rows(7, 6)), whole)
    one_by_one = SamplingBatch.from_rows([])
    for row in make_rows(13):
        one_by_one = one_by_one.append([row])
    assert_equal(one_by_one, whole)


@pytest.mark.parametrize("rows", [[], [3], [4, 2, 2, 12, 0], list(range(13))])
def test_select_equals_building_from_the_selected_rows(rows):
    whole = SamplingBatch.from_rows(make_rows(13))
    assert_equal(whole.select(rows), SamplingBatch.from_rows([make_rows(13)[row] for row in rows]))


def test_the_forward_copy_holds_every_declared_field_and_nobody_can_write_to_it():
    batch = SamplingBatch.from_rows(make_rows(5))
    copy = batch.copy_for_forward()
    assert copy is not batch
    assert_equal(copy, batch)
    for side in (copy, batch):
        for item in fields(SamplingBatch):
            with pytest.raises(ValueError, match="read-only"):
                getattr(side, item.name)[:] = 0
    grown = batch.append(make_rows(1))
    grown.scale[:] = 3.0
    assert_equal(batch.select(range(5)), copy)


def test_a_field_added_later_is_copied_too():
    @dataclass(slots=True, eq=False)
    class Wider(SamplingBatch):
        extra: Any = None

    batch = SamplingBatch.from_rows(make_rows(2))
    wide = Wider(**{item.name: getattr(batch, item.name) for item in fields(SamplingBatch)}, extra=np.arange(2))
    copy = wide.copy_for_forward()
    assert isinstance(copy, Wider) and copy.extra.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        wide.extra[:] = 9


def test_an_undeclared_attribute_is_impossible():
    with pytest.raises(AttributeError):
        SamplingBatch.from_rows([]).extra = 1  # type: ignore[attr-defined]


def test_selection_shares_no_memory():
    batch = SamplingBatch.from_rows(make_rows(5))
    before = batch.copy_for_forward()
    batch.select(range(5)).scale[:] = 0
    assert_equal(batch, before)


def test_needs_follow_the_rows():
    needs = [SamplingBatch.from_params([(params, 1)]).needs for params in KINDS]
    assert needs[0] == SamplingNeeds(all_greedy=False, any_greedy=False)
    assert needs[1] == SamplingNeeds()
    assert needs[2] == SamplingNeeds(False, False, True, True, True, any_bias=True) and needs[2].any_cutoff
    assert needs[3] == SamplingNeeds(False, False, any_penalty=True, top_logprobs=3)
    assert SamplingBatch.from_rows(make_rows(5)).needs == SamplingNeeds(False, True, True, True, True, True, True, 3)
    assert SamplingBatch.from_rows([]).needs == SamplingNeeds()
    assert len({*needs, SamplingNeeds()}) == 5 - 0


def test_early_bans_end_at_prompt_length_plus_min_tokens():
    batch = SamplingBatch.from_rows([SamplingRow(KINDS[4], 1, 0, 20, (7, 3, 7))])
    entries = list(zip(batch.bias_ids.tolist(), batch.bias_values.tolist(), batch.bias_until.tolist(), strict=True))
    assert entries == [(9, 2.0, noise.OFF), (3, -np.inf, 25), (7, -np.inf, 25)]


def test_batches_travel_between_processes():
    batch = SamplingBatch.from_rows(make_rows(4))
    assert_equal(pickle.loads(pickle.dumps(batch)), batch)


def test_the_extremes_of_the_parameters_fit_the_arrays():
    hot = SamplingParams(temperature=1e30, top_p=1e-12, min_p=1e-300, top_k=2**31 - 1, seed=2**64 - 1)
    batch = SamplingBatch.from_params([(hot, 2**64 - 1, 2**31 - 1), (SamplingParams(temperature=1e-4), 0)])
    assert batch.top_p[0] == 1 and np.isfinite(batch.scale).all()
