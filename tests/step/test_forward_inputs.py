"""Consistency of the declared inputs of a forward."""

from __future__ import annotations

from sglcore.step.batch_field import Axis, specs
from sglcore.step.forward_inputs import ForwardInputs
from sglcore.worker.schedule_batch import ForwardMode


def test_a_row_of_padding_is_a_request_whose_only_token_is_its_first() -> None:
    values = {spec.name: spec.padding.value for spec in specs(ForwardInputs)}
    assert values["seq_lens"] == 1
    assert values["extend_prefix_lens"] + values["extend_seq_lens"] == values["seq_lens"]


def test_no_token_is_real_on_any_rank_before_a_step_says_so() -> None:
    counts = [spec for spec in specs(ForwardInputs) if spec.axis is Axis.NONE and spec.is_buffered]
    assert {spec.padding.value for spec in counts} == {0}


def test_inputs_that_nobody_gave_are_an_idle_step_without_rows() -> None:
    idle = ForwardInputs()
    assert (idle.forward_mode, idle.batch_size, idle.num_tokens) == (ForwardMode.IDLE, 0, 0)
