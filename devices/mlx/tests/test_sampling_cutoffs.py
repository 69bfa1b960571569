"""Tests that cut-offs on MLX keep exactly the reference's candidates, with ties broken by the
lowest id, and that planted defects are detected."""

import math
import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.mlx.tests.sampling_rows import candidate_sets, planted
from sglcore.sampling import noise, reference_sampler
from sglcore.sampling.noise import LIMIT, OFF, TOP_P_OFF
from sglcore.sampling.params import SamplingParams
from sglcore_mlx.sampling import cutoffs
from sglcore_mlx.sampling.race import make_race_tables


@given(
    st.lists(st.one_of(st.none(), st.integers(-60, 60)), min_size=1, max_size=70),
    st.integers(0, 80),
    st.floats(0.001, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.05, 5.0),
)
def test_the_candidates_are_the_references(units, top_k, top_p, min_p, temperature):
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    logits = [-math.inf if unit is None else unit / 4 for unit in units] + [0.0]
    if params.is_greedy:
        return
    expected = sorted(reference_sampler.candidates(reference_sampler.gaps_below_best(logits, temperature), params))
    assert candidate_sets([logits], [params]) == [expected]


def test_top_k_keeps_exactly_k_and_gives_ties_to_the_lowest_ids():
    logits = [[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, 2.0]] * 4
    sets = candidate_sets(logits, [SamplingParams(top_k=k) for k in (2, 4, 6, 8)])
    assert sets == [[1, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 7], list(range(8))]


def test_rows_without_a_cutoff_are_untouched_beside_rows_with_one():
    logits = np.random.default_rng(1).normal(size=(3, 400))
    options = [SamplingParams(top_k=5), SamplingParams(), SamplingParams(top_p=0.2, min_p=0.1)]
    sets = candidate_sets(logits, options)
    assert len(sets[0]) == 5 and len(sets[1]) == 400 and 0 < len(sets[2]) < 100


def test_top_p_applies_to_what_top_k_left():
    sets = candidate_sets([[0.0] * 10] * 2, [SamplingParams(top_k=4, top_p=0.5), SamplingParams(top_p=0.5)])
    assert [len(ids) for ids in sets] == [2, 5]


def test_cutoffs_never_bring_a_masked_token_back_and_always_leave_one():
    logits = [[-math.inf, -math.inf, 0.0, -math.inf]] * 3
    options = [SamplingParams(top_k=3), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)]
    assert candidate_sets(logits, options) == [[2], [2], [2]]


def test_a_large_vocabulary_does_not_overflow_the_sums():
    count = 1 << 20
    sets = candidate_sets(np.zeros((1, count)), [SamplingParams(top_p=0.75)])
    assert len(sets[0]) == count * 3 // 4


def test_running_sums_are_exact_where_32_bits_and_floats_are_not():
    weights = np.random.default_rng(5).integers(0, (1 << 30) + 1, (2, 5000))
    weights[0] = 1 << 30
    found = np.array(cutoffs.running_sums(mx.array(weights.astype(np.int32))))
    assert found.dtype == np.int64 and np.array_equal(found, np.cumsum(weights, axis=-1))


def share_that_must_round_up():
    """Return a gap and a top_p, in units of 2**-24, for which the best token's weight is less than
    one unit below the share."""
    best = reference_sampler.weight(0)
    for gap in range(1, LIMIT):
        total = best + reference_sampler.weight(gap)
        share = (best << 24) // total + 1
        if share * total - (best << 24) < 1 << 24:
            return gap, share
    raise AssertionError("no gap gives such a share")


def keeps_the_references_candidates(module):
    """Return whether a cut-off module keeps the reference's candidates, on random rows with ties
    and with shares that end within a tie."""
    rng, tables = random.Random(7), make_race_tables(64)
    some = [rng.randrange(LIMIT + 1) for _ in range(200)]
    if module.token_weights(mx.array(some, mx.int32), tables.weight).tolist() != [
        reference_sampler.weight(gap) for gap in some
    ]:
        return False
    gap, share = share_that_must_round_up()
    pair = module.keep_prefix(mx.array([[0, gap] + [LIMIT] * 62], mx.int32), None, mx.array([share], mx.int32), tables)
    if pair[0, 1].item() != gap:
        return False
    for _ in range(60):
        gaps = [min(LIMIT, rng.choice((0, 1, 300, 45426, 70001, rng.randrange(LIMIT + 1)))) for _ in range(63)] + [0]
        params = SamplingParams(
            top_k=rng.choice((0, 2, 5, 31, 64)),
            top_p=rng.choice((1.0, 0.5, 0.25, 0.9, 1e-6)),
            min_p=rng.choice((0.0, 1.0, math.exp(-300 / noise.ONE))),
        )
        top_k = mx.array([params.top_k or OFF], mx.int32)
        top_p = mx.array([noise.fixed_top_p(params.top_p)], mx.int32)
        row = module.keep_prefix(mx.array([gaps], mx.int32), top_k, top_p, tables)
        row = np.array(module.keep_min_p(row, mx.array([noise.fixed_min_p(params.min_p)], mx.int32)))
        if np.flatnonzero(row[0] < LIMIT).tolist() != sorted(reference_sampler.candidates(gaps, params)):
            return False
    return True


def test_random_gaps_keep_the_references_candidates():
    assert TOP_P_OFF > 1 << 24 and keeps_the_references_candidates(cutoffs)


@pytest.mark.parametrize(
    ("sound", "defect"),
    [
        ("kept[:, None] - 1, axis=-1", "kept[:, None], axis=-1"),
        ("keys > last", "keys >= last"),
        ("(gaps.astype(mx.int64) << ID_BITS) | tables.ids", "(gaps.astype(mx.int64) << ID_BITS) | (63 - tables.ids)"),
        ("(running - weights) < wanted", "(running - weights) <= wanted"),
        ("(running - weights) < wanted", "running < wanted"),
        ("tables.ids < kept[:, None]", "tables.ids >= 0"),
        ("gaps > min_p[:, None]", "gaps >= min_p[:, None]"),
        ("low * top_p + ((1 << TOP_P_BITS) - 1)", "low * top_p"),
        ("return value - (", "return value + ("),
    ],
)
def test_a_planted_defect_of_the_cutoffs_is_caught(sound, defect):
    assert not keeps_the_references_candidates(planted(cutoffs, sound, defect))
