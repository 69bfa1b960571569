"""The host's view of a step's results."""

from __future__ import annotations

import numpy as np

from sglcore.sampling.state import Logprobs, SampledTokens
from sglcore.step.emitting_rows import plan_rows
from sglcore.step.step_output import StepOutput
from sglcore.worker.schedule_batch import ForwardMode
from tests.step.batches import ints, make_batch


def scores(first: float, count: int) -> Logprobs[np.ndarray]:
    """Log-probabilities of `count` tokens, with all numbers different."""
    values = np.arange(first, first + count, dtype=np.float32)
    ids = ints(values)
    return Logprobs(values, ids + 1, ids[:, None] + 2, values[:, None] + 3)


def test_tokens_flags_and_scores_come_back_as_they_were_sampled() -> None:
    rows = plan_rows(make_batch({4: [1, 2], 2: [5], 7: [6]}, emits=[False, True, True]))
    tokens = SampledTokens(ints([30, 40]), np.array([False, True]), scores(10, 2))
    output = StepOutput(rows, "eager", tokens, {2: scores(20, 1), 0: scores(30, 3)})
    result = output.read(9, output.arrays())
    assert (result.step, result.path, result.token_ids.tolist()) == (9, "eager", [30, 40])
    assert result.token_offsets.tolist() == [0, 0, 1, 2] and result.bad_rows.tolist() == [False, False, True]
    assert result.logprobs is not None and result.logprobs.chosen.tolist() == [10, 11]
    found = {row: (part.ranks.tolist(), part.top_ids.tolist()) for row, part in result.prompt_logprobs.items()}
    assert found == {2: ([21], [[22]]), 0: ([31, 32, 33], [[32], [33], [34]])}


def test_prompt_scores_without_scores_of_tokens_are_not_taken_for_them() -> None:
    rows = plan_rows(make_batch({4: [1, 2]}))
    output = StepOutput(rows, "eager", SampledTokens(ints([30]), np.array([False])), {0: scores(30, 1)})
    result = output.read(1, output.arrays())
    assert result.logprobs is None and result.prompt_logprobs[0].top_logprobs.tolist() == [[33]]


def test_an_embedding_that_is_no_number_is_a_bad_row() -> None:
    rows = plan_rows(make_batch({1: [1], 2: [2]}, ForwardMode.EMBED, emits=[False, False]))
    output = StepOutput(rows, "full:2", embeddings=np.array([[1, 2], [np.nan, 3]], np.float32))
    result = output.read(1, output.arrays())
    assert result.bad_rows.tolist() == [False, True] and result.token_ids.tolist() == []
    assert result.embeddings is not None and result.embeddings[0].tolist() == [1, 2]
    assert (result.step, result.path) == (1, "full:2")
