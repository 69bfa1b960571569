"""Penalties, bias and early bans, against transformers and against the plain formula."""

import math
import random

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from sglcore.sampling.params import SamplingParams
from sglcore.sampling.processors import token_counts
from sglcore.sampling.sampler import Sampler
from tests.sampling.rows import drawn, staged, with_history

VOCAB = 40


def processed(logits, rows, history, all_rows=True, positions=None):
    """The processed logits of rows with these token histories."""
    state = staged(
        rows, positions or [len(tokens) for tokens in history], penalties=with_history(rows, history, VOCAB, all_rows)
    )
    return Sampler(VOCAB, "cpu").process(logits, state)


def random_rows(count, seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = [
        (
            SamplingParams(
                repetition_penalty=rng.choice((1.0, 0.8, 1.5)),
                frequency_penalty=rng.choice((0.0, 0.7, -1.0)),
                presence_penalty=rng.choice((0.0, 1.1, -0.3)),
                logit_bias={rng.randrange(VOCAB): 2.5},
            ),
            1,
            0,
            rng.randrange(1, 6),
        )
        for _ in range(count)
    ]
    history = [[rng.randrange(VOCAB) for _ in range(row[3] + rng.randrange(9))] for row in rows]
    return torch.randn(count, VOCAB) * 4, rows, history


def plain(logits, row, tokens):
    """The formula in float64, one logit at a time: the repetition penalty counts all tokens, the
    other two count the output."""
    params, _, _, prompt_len = row
    output, result = tokens[prompt_len:], []
    for v, x in enumerate(logits.tolist()):
        if v in tokens:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(v) + params.presence_penalty * (v in output)
        result.append(x + params.logit_bias.get(v, 0.0))
    return torch.tensor(result)


@pytest.mark.parametrize("all_rows", [True, False])
def test_penalties_and_bias_follow_the_plain_formula(all_rows):
    logits, rows, history = random_rows(30, seed=1)
    found = processed(logits, rows, history, all_rows)
    for i, row in enumerate(rows):
        torch.testing.assert_close(found[i], plain(logits[i], row, history[i]), atol=2e-6, rtol=1e-6)


def test_a_subset_of_penalty_rows_gives_the_same_bits_as_all_rows():
    logits, rows, history = random_rows(30, seed=2)
    assert torch.equal(processed(logits, rows, history, True), processed(logits, rows, history, False))


@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_the_repetition_penalty_equals_that_of_transformers(penalty):
    torch.manual_seed(3)
    logits, history = torch.randn(4, VOCAB), torch.randint(0, VOCAB, (4, 12))
    rows = [(SamplingParams(repetition_penalty=penalty), 1, 0, 5)] * 4
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits)  # type: ignore[arg-type]
    torch.testing.assert_close(processed(logits, rows, history.tolist()), expected)


def test_counting_the_prompt_in_the_frequency_penalty_would_be_caught():
    logits = torch.zeros(1, VOCAB)
    rows = [(SamplingParams(frequency_penalty=1.0), 1, 0, 3)]
    found = processed(logits, rows, [[7, 7, 7, 8]])[0]
    assert found[7] == 0 and found[8] == -1


def test_neutral_rows_keep_every_bit():
    logits = torch.randn(3, VOCAB)
    logits[0, :4] = torch.tensor([math.inf, -math.inf, -0.0, math.nan])
    rows = [(SamplingParams(), 1, 0, 1), (SamplingParams(presence_penalty=1.0), 1, 0, 1), (SamplingParams(), 1, 0, 1)]
    found = processed(logits, rows, [[0, 1, 2, 3]] * 3)
    assert torch.equal(found[[0, 2]].nan_to_num(nan=5.0), logits[[0, 2]].nan_to_num(nan=5.0))


def test_running_twice_changes_nothing():
    logits, rows, history = random_rows(6, seed=5)
    penalties = with_history(rows, history, VOCAB)
    state = staged(rows, [len(tokens) for tokens in history], penalties=penalties)
    sampler = Sampler(VOCAB, "cpu")
    assert torch.equal(sampler.process(logits, state), sampler.process(logits, state))


def test_token_counts_ignore_cells_outside_the_range_and_ids_outside_the_vocabulary():
    history = torch.tensor([[1, 1, 2, -5, 1], [3, 3, 999, 0, 2], [1, 1, 1, 1, 1]], dtype=torch.int32)
    counts = token_counts(history, torch.tensor([5, 4, 0]), torch.tensor([1, 0, 0]), 5)
    assert counts.tolist() == [[0, 2, 1, 0, 0], [1, 0, 0, 2, 0], [0, 0, 0, 0, 0]]
    assert token_counts(history[:0], torch.zeros(0), torch.zeros(0), 5).shape == (0, 5)
    assert counts.dtype == torch.int32


def test_stop_ids_are_banned_until_min_tokens_are_drawn():
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 50.0
    row = (SamplingParams(min_tokens=3, temperature=0.0), 1, 0, 10, (9, 11))
    tokens = [drawn(logits, [row], [position]).token_ids.item() for position in range(10, 15)]
    assert tokens == [0, 0, 0, 9, 9]


def test_a_ban_beats_a_bias_on_the_same_token():
    row = (SamplingParams(min_tokens=1, logit_bias={9: 100.0}, temperature=0.0), 1, 0, 0, (9,))
    assert drawn(torch.zeros(1, VOCAB), [row], [0]).token_ids.item() == 0
    assert drawn(torch.zeros(1, VOCAB), [row], [1]).token_ids.item() == 9
