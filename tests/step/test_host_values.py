"""Values that are read from a host batch: optional values if present, one-shot values once, and
mirrors of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sglcore.step.batch_field import Axis, Once, Split, When, batch_field, batch_record, spec_of, zero
from sglcore.step.host_values import host_arrays, host_reader, padded
from sglcore.worker.schedule_batch import CaptureHiddenMode, ScheduleBatch
from tests.step.batches import ints, make_batch


def _starts(batch: ScheduleBatch, values: Mapping[str, Any]) -> Any:
    given = values.get("starts")
    return None if given is None else given + 1


@batch_record(ScheduleBatch)
class Inputs:
    """One field for each way to read a value."""

    starts: Any = batch_field(axis=Axis.REQUESTS, read="cell_limits", when=When.IF_GIVEN)
    after: Any = batch_field(axis=Axis.REQUESTS, read=_starts, when=When.IF_GIVEN)
    mode: Any = batch_field(axis=Axis.NONE, split=Split.COPY, read=Once("capture_hidden_mode"))
    same_mode: Any = batch_field(axis=Axis.NONE, split=Split.COPY, mirror="mode")
    total: Any = batch_field(axis=Axis.NONE, split=Split.COPY, dtype="int32", padding=zero(), read="slots")


def test_a_function_sees_what_was_given_and_what_it_does_not_give_is_not_there() -> None:
    reader = host_reader(Inputs, False)
    assert reader.read(make_batch({1: [5]})).keys().isdisjoint({"starts", "after"})
    values = reader.read(make_batch({1: [5]}, cell_limits=ints([3])))
    assert (values["starts"].tolist(), values["after"].tolist()) == ([3], [4])


def test_a_one_shot_value_and_its_mirror_are_one_value_which_is_taken_once() -> None:
    batch = make_batch({1: [5]})
    batch.capture_hidden_mode.put(CaptureHiddenMode.FULL)
    values = host_reader(Inputs, False).read(batch)
    assert values["mode"] is values["same_mode"] is CaptureHiddenMode.FULL
    assert not batch.capture_hidden_mode.is_set


def test_values_without_an_axis_are_not_padded() -> None:
    assert padded(spec_of(Inputs, "total"), np.array([4, 5]), 8).tolist() == [4, 5]


def test_a_value_without_an_axis_keeps_all_of_its_last_dimension() -> None:
    spec = replace(spec_of(Inputs, "total"), lead=(2,))
    assert padded(spec, np.arange(6).reshape(2, 3), 8).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_what_stays_on_the_host_by_request_is_neither_staged_nor_one_value_for_all() -> None:
    assert [spec.name for spec in host_arrays(Inputs)] == ["starts", "after"]
