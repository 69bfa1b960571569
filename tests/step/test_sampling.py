"""The sampling inputs of a batch: none if the composition is known, else the new state; targets,
masks and history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglcore.sampling.params import SamplingParams
from sglcore.sampling.state import Logprobs
from sglcore.step import sampling_arrays
from sglcore.step.emitting_rows import plan_rows
from sglcore.step.sampling_arrays import NO_INPUTS, sampling_inputs, score_prompts
from sglcore.worker.schedule_batch import ForwardMode
from tests.step.batches import GREEDY, ints, make_batch

PENALISED = SamplingParams(temperature=1.0, frequency_penalty=0.5)


def lists(arrays: Any) -> dict[str, list]:
    """The arrays as lists, by name."""
    return {name: array.tolist() for name, array in arrays.items()}


def test_a_decode_step_of_a_known_composition_needs_nothing() -> None:
    batch = make_batch({1: [-1], 2: [-2]}, ForwardMode.DECODE)
    assert sampling_inputs(batch, plan_rows(batch), 5) is NO_INPUTS


def test_a_new_composition_brings_the_state_of_the_emitting_rows() -> None:
    rows = [(GREEDY, 0), (PENALISED, 7, 0, 1), (SamplingParams(temperature=1.0, top_k=3), 8)]
    batch = make_batch({4: [1, 2, 3], 2: [5], 7: [6, 8]}, params=rows, emits=[False, True, True])
    inputs = sampling_inputs(batch, plan_rows(batch), 4)
    found = lists(inputs.arrays)
    assert (found["slots"], found["positions"], found["last"]) == ([2, 7], [1, 2], [3, 5])
    assert found["top_k"][1] == 3 and found["greedy"] == [False, False]
    assert (found["penalty_rows"], found["frequency"], found["prompt_len"]) == ([0], [0.5], [1])
    assert inputs.new is not None and inputs.new.number == 5 and inputs.new.needs.any_penalty
    assert inputs.new.penalised.tolist() == [0] and inputs.new.longest(batch, plan_rows(batch)) == 1


def test_penalties_of_all_rows_come_where_they_are_wanted() -> None:
    batch = make_batch({4: [1], 2: [5]}, params=[(GREEDY, 0), (PENALISED, 7)])
    found = sampling_inputs(batch, plan_rows(batch), 4, all_rows=True).arrays
    assert found["frequency"].tolist() == [0.0, 0.5] and "penalty_rows" not in found


def test_a_known_composition_brings_what_changes_in_every_step() -> None:
    masks = np.arange(4, dtype=np.int32).reshape(2, 2)
    batch = make_batch({4: [1, 2], 2: [5], 7: [6]}, emits=[False, True, True], mask_rows=ints([1, 2]), masks=masks)
    inputs = sampling_inputs(batch, plan_rows(batch), 5)
    assert inputs.new is None and set(inputs.arrays) == {"positions", "last", "mask_rows", "masks"}
    assert inputs.arrays["mask_rows"].tolist() == [0, 1]


PROMPT = [3, 1, 4, 1, 5, 9, 2]


def scored(last: int, chunks: bool = False) -> dict[int, Logprobs[Any]]:
    """Prompt scores of a batch with a row that requests none. Each hidden state is its token, and
    each score shows its inputs."""
    batch = make_batch(
        {6: [7, 7], 4: PROMPT, 3: [8, 8]}, prompt_logprobs=ints([-1, 2, 0]), next_ids=ints([-1, last, 6])
    )
    inputs = sampling_inputs(batch, plan_rows(batch), 5)

    def score(hidden: Any, targets: Any, top_n: int) -> Logprobs[Any]:
        assert len(hidden) == len(targets) and (not chunks or len(targets) <= 3)
        return Logprobs(hidden * 10 + targets, targets, np.full((len(targets), top_n), 1), hidden)

    vocab_size = sampling_arrays.PROMPT_LOGITS_ELEMENTS // 3 if chunks else 100
    return score_prompts(inputs, inputs.arrays, batch.input_ids, vocab_size, score, np.concatenate)


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("last", [6, -1])
def test_each_token_of_an_asking_row_predicts_the_next_however_it_is_cut(last: int, chunks: bool) -> None:
    """A chunk in the middle of a prompt knows the token after it; the token after the prompt is
    sampled, not scored."""
    found = scored(last, chunks)
    after = [*PROMPT[1:], last] if last >= 0 else PROMPT[1:]
    assert found[1].ranks.tolist() == after
    assert found[1].chosen.tolist() == [ids * 10 + target for ids, target in zip(PROMPT, after, strict=False)]
    assert found[1].top_ids.shape == (len(after), 2)
    assert found[2].ranks.tolist() == [8, 6] and found[2].top_ids.shape == (2, 0)
    assert set(found) == {1, 2}


@pytest.mark.parametrize(("last", "sizes"), [(-1, [1]), (6, [1, 1])])
def test_where_a_token_alone_fills_a_piece_each_is_scored_alone(last: int, sizes: list[int]) -> None:
    batch, seen = make_batch({4: [3, 8]}, prompt_logprobs=ints([0]), next_ids=ints([last])), []

    def score(hidden: Any, targets: Any, top_n: int) -> Logprobs[Any]:
        seen.append(len(targets))
        return Logprobs(hidden, targets, np.zeros((len(targets), top_n)), hidden)

    inputs = sampling_inputs(batch, plan_rows(batch), 5)
    score_prompts(inputs, inputs.arrays, batch.input_ids, sampling_arrays.PROMPT_LOGITS_ELEMENTS, score, np.concatenate)
    assert seen == sizes


def test_a_prompt_of_one_token_that_was_sampled_from_has_no_scores() -> None:
    batch = make_batch({4: [3]}, prompt_logprobs=ints([1]), next_ids=ints([-1]))
    inputs = sampling_inputs(batch, plan_rows(batch), 5)
    assert [(row.start, row.end) for row in inputs.scored] == [(0, 0)] and inputs.arrays["targets"].tolist() == []
