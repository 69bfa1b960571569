"""The shared integers of the noise: tables that do not depend on a mathematics library, and a hash
without visible structure."""

import itertools
import json
import math
import random

import numpy as np
import pytest
import torch

from sglcore.sampling import noise, reference_sampler
from sglcore.sampling.gumbel_race import MAX_VOCAB, _signed, gumbel_noise, make_race_tables, row_keys
from sglcore.sampling.noise import LIMIT, ONE, noise_tables
from tests.sampling.golden import checksum


def device_noise(seeds, positions, vocab_size):
    """float64[rows, V] of the torch noise."""
    words = torch.tensor(noise.seed_words(np.array(seeds, np.uint64), np.zeros(len(seeds))))
    keys = row_keys(words, torch.as_tensor(positions, dtype=torch.int32))
    tables = make_race_tables(vocab_size, "cpu")
    return gumbel_noise(keys, tables.hashed_ids, tables.gumbel).double().numpy() / ONE


def uniforms(values):
    return np.exp(-np.exp(-values))


def test_no_table_entry_is_near_a_rounding_boundary():
    knots = [
        noise.gumbel_knot(side, octave, step)
        for side in (False, True)
        for octave in range(32)
        for step in range(256 if octave < 31 else 1)
    ]
    knots += [noise.weight_knot(index) for index in range(noise.WEIGHT_SIZE + 1)]
    assert min(abs(knot % 1 - 0.5) for knot in knots) > 1e-6


def test_table_entries_agree_with_arbitrary_precision():
    mpmath = pytest.importorskip("mpmath", reason="needs arbitrary precision arithmetic")
    mpmath.mp.dps = 40
    rng = random.Random(3)
    for _ in range(300):
        side, octave, step = rng.random() < 0.5, rng.randrange(31), rng.randrange(256)
        x = mpmath.mpf(2) ** (octave - 32) * (1 + mpmath.mpf(step) / 256)
        exact = -mpmath.log(-mpmath.log(1 - x if side else x)) * ONE
        entry = noise_tables().gumbel[0, noise.gumbel_index(side, octave, step)]
        assert entry == int(mpmath.nint(exact))


def test_the_tables_match_the_stored_checksum():
    assert checksum(noise_tables()) == json.loads(reference_sampler.GOLDEN_FILE.read_text())["tables"]


def test_the_tables_cannot_be_written():
    with pytest.raises(ValueError):
        noise_tables().gumbel[0, 0] = 1
    assert noise_tables() is noise_tables()


def test_gumbel_knots_share_no_cell():
    cells = [
        noise.gumbel_index(side, octave, step) for side in (False, True) for octave in range(31) for step in range(256)
    ]
    cells += [noise.gumbel_index(side, 31, 0) for side in (False, True)]
    assert len(set(cells)) == len(cells)


def test_gumbel_noise_is_accurate_everywhere_and_reaches_both_ends():
    rng = random.Random(4)
    words = [rng.getrandbits(32) >> rng.choice((0, 0, 8, 16, 24, 31)) for _ in range(20000)]
    words += [0xFFFFFFFF ^ word for word in words]
    for word in words:
        odd = word | 1
        exact = -math.log(-math.log(odd / 2**32) if odd < 2**31 else -math.log1p(-(2**32 - odd) / 2**32))
        assert abs(reference_sampler.gumbel(word) / ONE - exact) < 1.7 / ONE
    assert reference_sampler.gumbel(0) / ONE < -3.09 and reference_sampler.gumbel(2**32 - 1) / ONE > 22.18


def test_noise_never_falls_as_the_hash_grows():
    words = np.unique(
        np.concatenate([np.arange(0, 2**32, 2**17), *(2**32 - 2 ** np.arange(32)[:, None] + np.arange(-3, 3))])
    )
    values = [reference_sampler.gumbel(int(word) % 2**32) for word in np.sort(words % 2**32)]
    assert all(a <= b for a, b in itertools.pairwise(values))


def test_a_token_at_the_limit_can_never_be_drawn():
    table = noise_tables().gumbel[0]
    assert table.max() - table.min() < LIMIT
    assert reference_sampler.weight(LIMIT) == 0


def test_weights_never_grow_with_the_gap_and_are_close_to_the_exponential():
    gaps = np.arange(0, LIMIT + 1, 7)
    weights = np.array([reference_sampler.weight(int(gap)) for gap in gaps[:20000]])
    assert (np.diff(weights) <= 0).all()
    exact = np.exp(-gaps[:20000] / ONE) * 2**30
    assert np.abs(weights / exact - 1).max() < 3e-6
    edges = np.arange(0, 400 * 256, 256)
    assert all(
        reference_sampler.weight(int(e) - 1) >= reference_sampler.weight(int(e)) >= reference_sampler.weight(int(e) + 1)
        for e in edges[1:]
    )


def test_host_hashes_agree_with_the_plain_python_ones():
    ids = noise.hashed_ids(1000).view(np.uint32)
    assert [int(x) for x in ids[:50]] == [noise.mix32((v + noise.ID_OFFSET) % 2**32) for v in range(50)]
    seeds, indices, positions = [0, 5, 2**64 - 1, 2**63], [0, 1, 2, 2**31 - 1], [0, 1, 2**20, 2**31 - 1]
    words = noise.seed_words(np.array(seeds, np.uint64), np.array(indices, np.uint64))
    keys = row_keys(torch.tensor(words), torch.tensor(positions, dtype=torch.int32)).numpy().view(np.uint32)
    expected = [reference_sampler.row_key(*where) for where in zip(seeds, indices, positions, strict=True)]
    assert [tuple(map(int, key)) for key in keys] == expected


def test_neighbouring_keys_never_collide():
    seen = {
        reference_sampler.row_key(seed, index, position)
        for seed in (*range(40), *(1 << b for b in range(6, 64)))
        for index in range(4)
        for position in range(20)
    }
    assert len(seen) == 98 * 80


def test_another_stream_of_a_seed_is_other_noise():
    assert reference_sampler.row_key(1, 0, 0, stream=1) != reference_sampler.row_key(1, 0, 0)
    seeds, indices = np.array([1], np.uint64), np.array([0], np.uint64)
    assert (noise.seed_words(seeds, indices, 1) != noise.seed_words(seeds, indices)).any()


def test_noise_is_uniform_over_positions_for_every_token():
    u = uniforms(device_noise([11] * 20000, range(20000), 64))
    for bins in (16, 256):
        for token in range(64):
            counts = np.bincount((u[:, token] * bins).astype(int), minlength=bins)
            chi = ((counts - 20000 / bins) ** 2).sum() * bins / 20000
            assert chi < bins + 6 * math.sqrt(2 * bins), (bins, token, chi)


def pair_statistic(u, v, bins=8):
    """Normalised chi-square of independence of two uniform samples; about N(0, 1) if
    independent."""
    cells = np.bincount((u * bins).astype(int) * bins + (v * bins).astype(int), minlength=bins * bins)
    expected = len(u) / bins**2
    return (((cells - expected) ** 2).sum() / expected - bins**2) / math.sqrt(2 * bins**2)


def test_tokens_positions_and_seeds_are_pairwise_independent():
    u = uniforms(device_noise([5] * 20001, range(20001), 40))
    other = uniforms(device_noise([6] * 20001, range(20001), 40))
    worst = max(pair_statistic(u[:, a], u[:, b]) for a in range(20) for b in range(a + 1, 20))
    worst = max(worst, *(pair_statistic(u[:-1, a], u[1:, a]) for a in range(40)))
    worst = max(worst, *(pair_statistic(u[:, a], other[:, a]) for a in range(40)))
    worst = max(worst, *(pair_statistic(u[0:-1, a], u[1:, a + 1]) for a in range(39)))
    assert worst < 6, worst


def test_tokens_whose_hashed_ids_differ_in_few_bits_are_independent():
    ids = torch.tensor([0x1234567, *(0x1234567 ^ (1 << b) for b in range(31)), 0x1234567 - 2**31], dtype=torch.int32)
    words = torch.tensor(noise.seed_words(np.array([9], np.uint64), np.zeros(1)))
    keys = row_keys(words.expand(40000, 2), torch.arange(40000, dtype=torch.int32))
    u = uniforms(gumbel_noise(keys, ids, torch.tensor(noise_tables().gumbel)).double().numpy() / ONE)
    statistics = [pair_statistic(u[:, 0], u[:, b]) for b in range(1, len(ids))]
    assert max(statistics) < 6, statistics


def test_the_independence_test_catches_noise_that_ignores_position():
    u = uniforms(device_noise([5] * 2000, [0] * 2000, 4))
    assert pair_statistic(u[:-1, 0], u[1:, 0]) > 6


@pytest.mark.parametrize("word", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_signed_word_has_the_same_bits(word):
    assert np.array(_signed(word), np.int32).view(np.uint32) == word


def test_the_largest_vocabulary_has_tables_and_a_larger_one_is_refused():
    assert len(make_race_tables(MAX_VOCAB, "cpu").ids) == MAX_VOCAB
    with pytest.raises(ValueError, match=f"wanted 1..{MAX_VOCAB}"):
        make_race_tables(MAX_VOCAB + 1, "cpu")


def test_the_key_of_a_draw_is_the_references_in_every_stream():
    draws = [(2**64 - 1, 3, 70, stream) for stream in (0, 1, 5, 2**31)]
    words = np.concatenate([noise.seed_words(np.array([s], np.uint64), np.array([i]), t) for s, i, _, t in draws])
    keys = row_keys(torch.tensor(words), torch.full((len(draws),), 70, dtype=torch.int32))
    assert keys.numpy().view(np.uint32).tolist() == [list(reference_sampler.row_key(*draw)) for draw in draws]
    assert len({tuple(key) for key in keys.tolist()}) == len(draws)
