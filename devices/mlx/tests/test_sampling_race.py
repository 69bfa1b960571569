"""Tests the sampling race on MLX: the golden draws, the reference's integers, ties, bad rows, and
that planted defects are detected."""

import math
import random

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.mlx.tests.sampling_rows import (
    compiled_draw,
    drawn,
    planted,
    random_logits,
    random_params,
    staged,
    tokens_of,
)
from sglcore.core.errors import ConfigError
from sglcore.sampling import noise, reference_sampler
from sglcore.sampling.noise import LIMIT
from sglcore.sampling.params import SamplingParams
from sglcore_mlx.sampling import race
from sglcore_mlx.sampling.sampler import Sampler

EDGES = (0, 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2**25 - 3, 12345)
HALVES = [0.0] + [-(step + 0.5) / 65536 for step in range(40)]


def test_every_golden_token_is_drawn_in_every_float_width():
    for golden in reference_sampler.golden_draws():
        row = np.array([golden.logits], np.float32)
        for dtype in (mx.float16, mx.bfloat16, mx.float32):
            logits = mx.array(row).astype(dtype)
            if not np.array_equal(np.array(logits.astype(mx.float32)), row):
                continue
            found = drawn(
                logits.astype(mx.float32), [(golden.params, golden.seed, golden.sample_index)], [golden.position]
            )
            assert found.token_ids.tolist() == [golden.token], golden.name


@given(st.integers(0, 2**32 - 1))
def test_a_batch_draws_what_the_reference_draws(seed):
    rng = random.Random(seed)
    count, vocab_size = rng.randrange(1, 6), rng.choice((1, 2, 7, 60, 300))
    logits = random_logits(rng, count, vocab_size)
    rows = [(random_params(rng), rng.randrange(2**64), rng.randrange(4)) for _ in range(count)]
    positions = [rng.randrange(2**20) for _ in range(count)]
    found = drawn(logits, rows, positions)
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        expected = reference_sampler.reference_draw(logits[i].tolist(), *row, position)
        assert (found.token_ids[i].item(), found.bad_rows[i].item()) == expected, row


def noise_of(module, words):
    """Return a module's Gumbel noise for given hashes: with row key (0, 1), and the hash inverted
    to find the ids."""
    seeds = [unmixed(word) for word in words]
    tables = module.make_race_tables(1)
    keys = mx.array([[0, 1]], mx.uint32)
    return module.gumbel_noise(keys, mx.array(np.array(seeds, np.uint32)), tables.gumbel)[0].tolist()


def unmixed(word):
    """Return the input with the hash `word` under the key (0, 1): inverts the rounds of
    `token_hash`."""
    inverse = pow(noise.MIX_2, -1, 1 << 32)
    word ^= word >> 16
    word = word * inverse & noise.WORD
    word ^= word >> 15 ^ word >> 30
    return word ^ word >> 16


def test_noise_is_the_references_at_every_edge():
    assert noise_of(race, EDGES) == [reference_sampler.gumbel(word) for word in EDGES]


def draws_the_references_tokens(module):
    """Return whether a race module's hashes, keys, gaps and ties give the reference's tokens, on
    rows of equal and of unequal logits."""
    rng, vocab_size = random.Random(4), 97
    logits = np.array([[0.0] * vocab_size, (HALVES * 3)[:vocab_size], [-0.25 * v for v in range(vocab_size)]])
    logits = np.tile(logits, (40, 1)).astype(np.float32)
    seeds = [(rng.randrange(2**64), rng.randrange(3), rng.randrange(2**21)) for _ in logits]
    words = noise.seed_words(
        np.array([seed for seed, _, _ in seeds], np.uint64), np.array([i for _, i, _ in seeds], np.uint64)
    )
    tables = module.make_race_tables(vocab_size)
    keys = module.row_keys(mx.array(words), mx.array([position for *_, position in seeds], mx.int32))
    rows = mx.array(logits)
    gaps = module.gaps_below_best(rows, mx.max(rows, axis=-1), mx.full(len(seeds), 65536.0))
    wanted_gaps = [reference_sampler.gaps_below_best(row, 1.0) for row in logits.tolist()]
    tokens = [
        reference_sampler.reference_draw(logits[i].tolist(), SamplingParams(), *seeds[i])[0] for i in range(len(seeds))
    ]
    ties = module.draw_race(mx.full((1, 4), LIMIT), mx.array([[0, 1]], mx.uint32), level_tables(module))
    return (
        gaps.tolist() == wanted_gaps
        and module.draw_race(gaps, keys, tables).tolist() == tokens
        and noise_of(module, EDGES) == [reference_sampler.gumbel(word) for word in EDGES]
        and ties.tolist() == [0]
    )


def level_tables(module):
    """Return tables of four tokens with equal hashes, so all scores of a row of equal logits are
    equal."""
    tables = module.make_race_tables(4)
    return module.RaceTables(tables.gumbel, tables.weight, tables.ids, mx.zeros(4, mx.uint32))


def test_hashes_gaps_and_ties_are_the_references():
    assert draws_the_references_tokens(race)


@pytest.mark.parametrize(
    ("sound", "defect"),
    [
        (
            "_fold(_fold(_fold(words, 16) * keys[:, 1:], 15) * noise.MIX_2, 16)",
            "_fold(_fold(words, 16) * keys[:, 1:], 15) * noise.MIX_2",
        ),
        ("_hash(hashed_ids ^ keys[:, :1], keys) | 1", "_hash(hashed_ids ^ keys[:, :1], keys)"),
        ("* noise.POSITION_FACTOR", "* 1"),
        ("mx.round(", "mx.floor("),
        (
            "mx.round((best[:, None] - logits) * scale[:, None])",
            "mx.floor((best[:, None] - logits) * scale[:, None] + 0.5)",
        ),
        ("_mix32(words[:, 1] + first) | 1", "_mix32(words[:, 1] + first)"),
        ("numbers * -FOLD", "-numbers"),
        ("(step * fraction) >> INTERPOLATION_BITS", "(step * fraction) >> 16"),
        (
            "mx.argmax(scores, axis=-1).astype(mx.int32)",
            "scores.shape[1] - 1 - mx.argmax(scores[:, ::-1], axis=-1).astype(mx.int32)",
        ),
        ("keys, tables.hashed_ids, tables.gumbel", "keys, tables.ids.astype(mx.uint32), tables.gumbel"),
    ],
)
def test_a_planted_defect_of_the_race_is_caught(sound, defect):
    assert not draws_the_references_tokens(planted(race, sound, defect))


def test_greedy_takes_the_first_of_equal_logits_and_says_nothing_of_the_seed():
    logits = [[5.0, 90.0, 90.0, 1.0, 90.0], [-0.0, 0.0, -1.0, 0.0, -math.inf]]
    for seed in range(3):
        rows = [(SamplingParams(temperature=0.0), seed)] * 2
        assert drawn(logits, rows, [seed, 7]).token_ids.tolist() == [1, 0]
        mixed = [*rows, (SamplingParams(), seed)]
        assert tokens_of(drawn([*logits, logits[0]], mixed, [seed, 7, 1]))[:2] == [1, 0]


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=3, top_p=0.9)]
)
def test_rows_with_nan_or_infinity_or_nothing_left_are_bad_and_draw_zero(params):
    logits = np.zeros((5, 70), np.float32)
    logits[:, 9] = 50.0
    logits[0, 3], logits[1, 69], logits[2, 5] = np.nan, np.nan, np.inf
    logits[3] = -np.inf
    found = drawn(logits, [(params, 1)] * 5, [0] * 5)
    assert found.bad_rows.tolist() == [True, True, True, True, False]
    assert found.token_ids.tolist() == [0, 0, 0, 0, 9]
    mixed = [(params, 1), (SamplingParams(temperature=0.0), 1)]
    assert drawn(logits[:2], mixed, [0, 0]).token_ids.tolist() == [0, 0]


def test_a_row_draws_alone_what_it_draws_in_a_batch():
    rng = random.Random(11)
    logits = random_logits(rng, 9, 500)
    rows = [(random_params(rng), rng.randrange(2**64), i % 3) for i in range(9)]
    together = tokens_of(drawn(logits, rows, list(range(9))))
    assert together == [drawn(logits[i : i + 1], [rows[i]], [i]).token_ids.item() for i in range(9)]
    order = rng.sample(range(9), 9)
    shuffled = drawn(logits[order], [rows[i] for i in order], order).token_ids.tolist()
    assert shuffled == [together[i] for i in order]


def test_a_compiled_function_draws_the_same_tokens():
    rng = random.Random(12)
    logits = random_logits(rng, 8, 300)
    rows = [(random_params(rng), rng.randrange(2**64)) for _ in range(8)]
    sampler = Sampler(300, compiled=True)
    for start, end in ((0, 8), (0, 1), (3, 6), (0, 8)):
        some, positions = rows[start:end], list(range(start, end))
        found = tokens_of(drawn(logits[start:end], some, positions))
        assert compiled_draw(logits[start:end], some, positions) == found
        assert tokens_of(sampler.sample(mx.array(logits[start:end]), staged(some, positions))) == found


def test_a_vocabulary_whose_ids_do_not_fit_is_refused():
    for size in (0, race.MAX_VOCAB + 1):
        with pytest.raises(ConfigError, match="wanted 1\\.\\."):
            race.make_race_tables(size)
