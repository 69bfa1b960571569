"""The race draws from the exact distribution: chi-square over many positions and sample indices,
fixed seeds."""

import math
import random

import numpy as np
import pytest
import torch

from sglcore.sampling.params import SamplingParams
from tests.sampling.rows import drawn, many_draws

VOCAB = 50
DRAWS = 200_000


def steep_logits(seed=7):
    rng = random.Random(seed)
    return [rng.gauss(0, 2) for _ in range(VOCAB)]


def exact_law(logits, params):
    """Probabilities after temperature and cut-offs, in float64."""
    p = np.exp((np.array(logits) - max(logits)) / params.temperature)
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), bool)
    keep[order[: params.top_k or None]] = True
    q = np.where(keep, p, 0) / p[keep].sum()
    before = np.cumsum(q[order]) - q[order]
    keep[order] &= before < params.top_p
    keep &= p >= params.min_p * p.max()
    return np.where(keep, p, 0) / p[keep].sum()


def chi_square(tokens, law):
    """(statistic - degrees) / sqrt(2 * degrees) over tokens expected at least 5 times, others
    pooled."""
    counts, expected = np.bincount(tokens, minlength=len(law)), law * len(tokens)
    assert counts[law == 0].sum() == 0
    common = expected >= 5
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * max(degrees, 1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8, "top_k": 20},
        {"top_p": 0.9},
        {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
def test_tokens_follow_the_exact_law(options):
    params, logits = SamplingParams(**options), steep_logits()
    statistic = chi_square(many_draws(logits, params, DRAWS, seed=21).numpy(), exact_law(logits, params))
    assert statistic < 5, statistic


def test_a_rare_token_is_drawn_as_often_as_it_should():
    logits = [0.0] + [-9.0] * 49
    tokens = many_draws(logits, SamplingParams(), DRAWS, seed=4)
    expected = DRAWS * 49 * math.exp(-9) / (1 + 49 * math.exp(-9))
    assert abs(int((tokens > 0).sum()) - expected) < 5 * math.sqrt(expected)


def test_sample_indices_follow_the_law_and_successive_draws_are_independent():
    logits, params = steep_logits(9), SamplingParams()
    law = exact_law(logits, params)
    rows = [(params, 77, index) for index in range(20000)]
    by_index = drawn(torch.tensor([logits]).expand(20000, -1), rows, [3] * 20000).token_ids.long().numpy()
    assert chi_square(by_index, law) < 5
    by_position = many_draws(logits, params, DRAWS, seed=77).numpy()
    for first, second in (
        (by_index[:-1], by_index[1:]),
        (by_position[:-1], by_position[1:]),
        (by_index, by_position[:20000]),
    ):
        assert chi_square(first * VOCAB + second, np.outer(law, law).ravel()) < 5


def test_the_law_catches_a_sampler_whose_noise_ignores_position():
    logits, params = steep_logits(), SamplingParams()
    rows = [(params, 21)] * 3000
    tokens = drawn(torch.tensor([logits]).expand(3000, -1), rows, [5] * 3000).token_ids.long().numpy()
    assert chi_square(tokens, exact_law(logits, params)) > 100


def test_the_law_catches_a_temperature_that_is_one_twentieth_off():
    logits = steep_logits()
    tokens = many_draws(logits, SamplingParams(temperature=1.05), DRAWS, seed=21).numpy()
    assert chi_square(tokens, exact_law(logits, SamplingParams())) > 5
