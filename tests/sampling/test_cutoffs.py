"""Candidate sets: exact top-k with ties broken by the lowest id, and top-p against rational
arithmetic."""

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglcore.sampling import narrow_sums, reference_sampler
from sglcore.sampling.cutoffs import BIN_BITS, keep_top_p_, token_weights
from sglcore.sampling.noise import LIMIT, ONE, TOP_P_BITS, noise_tables
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.sampler import Sampler, candidate_gaps
from tests.sampling.rows import staged

WHOLE = 1 << TOP_P_BITS


def candidate_sets(logits, params_list):
    """The sorted candidate ids of every row by torch; the 32-bit path must give the same."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    state = staged([(params, 0) for params in params_list], [0] * len(params_list))
    tables = Sampler(logits.shape[1], "cpu").tables
    gaps = candidate_gaps(logits, logits.amax(-1), state, tables)
    assert torch.equal(gaps, candidate_gaps(logits, logits.amax(-1), state, replace(tables, is_narrow=True)))
    return [torch.nonzero(row < LIMIT)[:, 0].tolist() for row in gaps]


def exact_sets(logits, params):
    """(certain, possible) ids by rational arithmetic; they differ only within a relative 1e-5 of a
    boundary."""
    order = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    order = [v for v in order if logits[v] > -math.inf][: params.top_k or None]
    mass = {v: Fraction(math.exp((logits[v] - logits[order[0]]) / params.temperature)) for v in order}
    total, margin = sum(mass.values()), Fraction(1, 10**5)

    def kept(share, floor):
        before, ids = Fraction(0), []
        for v in order:
            if before < share * total and mass[v] >= floor:
                ids.append(v)
            before += mass[v]
        return ids

    p, m = Fraction(params.top_p), Fraction(params.min_p)
    whole = Fraction(2) if params.top_p == 1.0 else None
    certain = kept(whole or p * (1 - margin), m * (1 + margin))
    return set(certain), set(kept(whole or p * (1 + margin), m * (1 - margin)))


@pytest.mark.parametrize("seed", range(6))
def test_candidate_sets_agree_with_rational_arithmetic(seed):
    rng = random.Random(seed)
    decided = 0
    for _ in range(40):
        count = rng.choice((1, 2, 7, 60, 300))
        logits = [rng.choice((rng.gauss(0, 3), rng.gauss(0, 3), -math.inf, 1.0)) for _ in range(count)]
        logits[rng.randrange(count)] = 2.0
        params = SamplingParams(
            temperature=rng.choice((0.5, 1.0, 1.7)),
            top_k=rng.choice((0, 2, 5, 50)),
            top_p=rng.choice((1.0, 0.999, 0.9, 0.5, 0.1, 1e-6)),
            min_p=rng.choice((0.0, 0.0, 0.01, 0.3)),
        )
        certain, possible = exact_sets(logits, params)
        found = set(candidate_sets([logits], [params])[0])
        assert certain <= found <= possible, (seed, params)
        decided += certain == possible
    assert decided > 30


@given(
    st.lists(st.integers(-60, 60), min_size=1, max_size=70),
    st.integers(0, 80),
    st.floats(0.001, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.05, 5.0),
)
def test_torch_and_the_reference_keep_the_same_candidates(units, top_k, top_p, min_p, temperature):
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    if params.is_greedy:
        return
    logits = [unit / 4 for unit in units]
    expected = sorted(reference_sampler.candidates(reference_sampler.gaps_below_best(logits, temperature), params))
    assert candidate_sets([logits], [params]) == [expected]


def test_top_k_keeps_exactly_k_and_gives_ties_to_the_lowest_ids():
    logits = [[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, 2.0]] * 7
    sets = candidate_sets(logits, [SamplingParams(top_k=k) for k in range(2, 9)])
    assert sets == [
        [1, 3],
        [1, 2, 3],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5],
        [1, 2, 3, 4, 5, 7],
        [0, 1, 2, 3, 4, 5, 7],
        list(range(8)),
    ]


def test_top_k_on_a_level_row_keeps_the_first_k_ids():
    assert candidate_sets(torch.zeros(1, 5000), [SamplingParams(top_k=1234)]) == [list(range(1234))]


def test_top_p_on_a_level_row_keeps_the_share():
    sets = candidate_sets(torch.zeros(4, 1000), [SamplingParams(top_p=p) for p in (0.25, 0.2505, 1e-9, 0.9999)])
    assert [len(ids) for ids in sets] == [250, 251, 1, 1000] and all(ids == list(range(len(ids))) for ids in sets)


def test_cutoffs_never_bring_a_masked_token_back_and_always_leave_one():
    logits = [[-math.inf, -math.inf, 0.0, -math.inf]] * 3
    options = [SamplingParams(top_k=3), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)]
    assert candidate_sets(logits, options) == [[2], [2], [2]]


def test_rows_without_a_cutoff_are_untouched_beside_rows_with_one():
    torch.manual_seed(1)
    logits = torch.randn(3, 400)
    options = [SamplingParams(top_k=5), SamplingParams(), SamplingParams(top_p=0.2, min_p=0.1)]
    sets = candidate_sets(logits, options)
    assert len(sets[0]) == 5 and len(sets[1]) == 400 and 0 < len(sets[2]) < 100


def test_top_p_applies_to_what_top_k_left():
    logits = [[0.0] * 10] * 2
    sets = candidate_sets(logits, [SamplingParams(top_k=4, top_p=0.5), SamplingParams(top_p=0.5)])
    assert [len(ids) for ids in sets] == [2, 5]


def test_a_large_vocabulary_does_not_overflow_the_sums():
    count = 1 << 20
    sets = candidate_sets(torch.zeros(1, count), [SamplingParams(top_p=0.75)])
    assert len(sets[0]) == count * 3 // 4


def test_the_tie_law_catches_an_unstable_selection():
    row = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    last_first = 7 - row.flip(-1).sort(descending=True, stable=True).indices[0, :4]
    assert sorted(last_first.tolist()) != candidate_sets(row, [SamplingParams(top_k=4)])[0]


def test_the_rational_law_catches_a_prefix_that_stops_one_short():
    logits = [0.0, -1.0, -2.0, -3.0]
    certain, _ = exact_sets(logits, SamplingParams(top_p=0.8))
    found = candidate_sets([logits], [SamplingParams(top_p=0.8)])[0]
    assert not certain <= set(found[:-1])


def test_limit_and_one_fit_the_table():
    assert noise_tables().weight.shape == (2, (LIMIT >> 8) + 1) and LIMIT == 32 * ONE


@pytest.mark.parametrize("share", [1, WHOLE // 3, WHOLE - 7, WHOLE])
def test_sums_in_two_words_reach_as_far_as_those_of_64_bits(share):
    generator = torch.Generator().manual_seed(share)
    table = torch.tensor(noise_tables().weight)
    for most in (1, 3, 400_000, LIMIT + 1):
        gaps = torch.randint(0, most, (2, 1 << 17), generator=generator, dtype=torch.int32)
        top_p = torch.tensor([share, WHOLE // 2], dtype=torch.int32)
        assert torch.equal(keep_top_p_(gaps.clone(), top_p, table), keep_top_p_(gaps.clone(), top_p, table, True))


def test_a_product_in_two_words_is_exact():
    one = torch.randint(0, (1 << 30) + 1, (1000,), dtype=torch.int32)
    other = torch.randint(0, (1 << 24) + 1, (1000,), dtype=torch.int32)
    one[0], other[0] = 1 << 30, 1 << 24
    found = narrow_sums.product(one, other)
    assert torch.equal((found.high.long() << 24) + found.low, one.long() * other)


def ties_are_exact() -> bool:
    """The invariant: the number of ties is the smallest that reaches the rest, also if the rest is
    near a multiple of the weight."""
    generator = torch.Generator().manual_seed(2)
    each = torch.randint(1, (1 << 30) + 1, (4000,), generator=generator, dtype=torch.int32)
    counts = torch.randint(1, narrow_sums.MOST_TIES - 4, (4000,), generator=generator) >> torch.arange(4000) % 22
    for over in (-1, 0, 1):
        rest = (each.long() * counts + over).clamp(min=0)
        wide = narrow_sums.Wide(*((part.int()[:, None]) for part in (rest >> 24, rest & ((1 << 24) - 1))))
        if not torch.equal(narrow_sums.ties(wide, each).long(), (rest + each - 1) // each):
            return False
    return True


def what_is_wanted_is_exact() -> bool:
    """The invariant: the rest at the end of the prefix plus the weights before it is the top-p
    share of the total, rounded up."""
    generator, table = torch.Generator().manual_seed(3), torch.tensor(noise_tables().weight)
    gaps = torch.randint(0, 400_000, (64, 50), generator=generator, dtype=torch.int32)
    weights, top_p = token_weights(gaps, table), torch.randint(1, WHOLE, (64,), generator=generator, dtype=torch.int32)
    last, rest = narrow_sums.prefix_end(gaps, weights, top_p, BIN_BITS, LIMIT)
    before = (weights * (gaps < last[:, None])).sum(-1)
    found = (before + (rest.high.long() << 24)[:, 0] + rest.low[:, 0]).tolist()
    totals = weights.sum(-1).tolist()
    return found == [-(-total * share // WHOLE) for total, share in zip(totals, top_p.tolist(), strict=True)]


def share_rounded_down(total: narrow_sums.Wide, top_p: torch.Tensor) -> narrow_sums.Wide:
    low = narrow_sums.product(total.low, top_p).high
    return narrow_sums.product(total.high, top_p).plus(narrow_sums.Wide(low >> 24, low & ((1 << 24) - 1)))


@pytest.mark.parametrize(
    ("law", "name", "mutant"),
    [
        (ties_are_exact, "NEAR", 0),
        (ties_are_exact, "MOST_TIES", 1 << 16),
        (what_is_wanted_is_exact, "_share", share_rounded_down),
    ],
)
def test_sums_in_two_words_are_exact_and_near_ones_are_caught(law, name, mutant, monkeypatch):
    assert law()
    if name == "MOST_TIES":
        real = narrow_sums.ties
        monkeypatch.setattr(narrow_sums, "ties", lambda *args: real(*args).clamp(max=mutant))
    else:
        monkeypatch.setattr(narrow_sums, name, mutant)
    assert not law()
