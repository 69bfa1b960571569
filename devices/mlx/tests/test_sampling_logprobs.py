"""Tests log-probabilities on MLX against float64, ranks and top lists with ties broken by the
lowest id, and that planted defects are detected."""

import math

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.sampling_rows import drawn, planted
from sglcore.sampling.params import SamplingParams
from sglcore_mlx.sampling import logprobs


def wanted(logits, targets, count):
    """Return (chosen, ranks, ids, top list) in float64, by sorting on (-logit, id)."""
    rows = np.asarray(logits, np.float64)
    best = rows.max(-1, keepdims=True)
    norm = best + np.log(np.exp(rows - best).sum(-1, keepdims=True))
    order = np.array([sorted(range(len(row)), key=lambda v, row=row: (-row[v], v)) for row in rows])
    ranks = [order[i].tolist().index(target) + 1 for i, target in enumerate(targets)]
    chosen = (rows - norm)[np.arange(len(rows)), targets]
    return chosen, ranks, order[:, :count], np.take_along_axis(rows - norm, order[:, :count], axis=-1)


def agrees_with_float64(module):
    """Return whether a module's log-probabilities agree with float64 within 1e-5, and its ranks and
    ids exactly."""
    rng = np.random.default_rng(1)
    logits = np.concatenate([rng.normal(0, 3, (6, 90)), rng.integers(-2, 3, (6, 90))]).astype(np.float32)
    logits[8:10] = np.minimum(logits[8:10], 0.0)
    logits[8:10, ::3] *= -0.0
    logits[10, 5:] = -np.inf
    targets = rng.integers(0, 5, 12).astype(np.int32)
    for dtype in (mx.float32, mx.bfloat16):
        given = mx.array(logits).astype(dtype)
        found = module.logprobs_of(given, mx.array(targets), 7)
        chosen, ranks, ids, top = wanted(np.array(given.astype(mx.float32)), targets, 7)
        exact = found.ranks.tolist() == ranks and found.top_ids.tolist() == ids.tolist()
        if not (exact and np.allclose(found.chosen, chosen, atol=1e-5) and np.allclose(found.top, top, atol=1e-5)):
            return False
    return True


def test_chosen_ranks_and_lists_agree_with_float64():
    assert agrees_with_float64(logprobs)


@pytest.mark.parametrize(
    ("sound", "defect"),
    [
        ("(ids < targets)", "(ids > targets)"),
        ("(last - ids)", "ids"),
        ("ordered - (ordered >> 31)", "ordered"),
        ("bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits"),
        ("-mx.sort(-mx.topk(keys, count, axis=-1), axis=-1)", "mx.topk(keys, count, axis=-1)"),
        ("astype(mx.int32) + 1", "astype(mx.int32)"),
        ("axis=-1) - norm", "axis=-1)"),
    ],
)
def test_a_planted_defect_of_the_logprobs_is_caught(sound, defect):
    assert not agrees_with_float64(planted(logprobs, sound, defect))


@pytest.mark.parametrize("count", [0, 1, 8, 20])
def test_lists_are_as_long_as_asked_for_and_as_the_vocabulary_allows(count):
    found = logprobs.logprobs_of(mx.zeros((3, 8)), mx.array([7, 0, 3]), count)
    length = min(count, 8)
    assert found.top_ids.tolist() == [list(range(length))] * 3 and found.top.shape == (3, length)
    assert found.ranks.tolist() == [8, 1, 4]
    assert np.allclose(found.chosen, -math.log(8), atol=1e-6)


def test_targets_outside_the_vocabulary_and_no_rows_at_all_are_allowed():
    found = logprobs.logprobs_of(mx.array([[0.0, 1.0]] * 2), mx.array([-5, 99]), 1)
    assert found.ranks.tolist() == [2, 1]
    none = logprobs.logprobs_of(mx.zeros((0, 5)), mx.zeros(0, mx.int32), 2)
    assert none.chosen.shape == (0,) and none.top.shape == (0, 2) and none.top_ids.tolist() == []


def test_the_sampler_reports_the_raw_logits_of_the_token_it_drew():
    logits = [[0.0, 3.0, 1.0]] * 2
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias={2: 50.0})
    found = drawn(logits, [(params, 1), (SamplingParams(), 2)], [0, 0]).logprobs
    assert found is not None and found.ranks[0].item() == 2 and found.top_ids.tolist() == [[1, 2]] * 2
    assert abs(found.chosen[0].item() - (1.0 - math.log(1 + math.e + math.e**3))) < 1e-6
    assert drawn(logits, [(SamplingParams(), 2)] * 2, [0, 0]).logprobs is None
