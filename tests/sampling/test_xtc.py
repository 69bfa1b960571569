"""XTC against plain numpy in floats: its result, its coin, and rows without XTC in the same batch;
planted defects are caught."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from sglcore.sampling import cutoffs, gumbel_race, narrow_sums, sampler, xtc
from sglcore.sampling.gumbel_race import coins, make_race_tables, row_keys
from sglcore.sampling.noise import LIMIT
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.sampling.reference_sampler import coin, reference_draw, row_key
from sglcore.sampling.sampler import Sampler
from tests.planted import planted
from tests.sampling.rows import drawn, staged


def by_numpy(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """bool[V]: the tokens that may be drawn when the coin says that XTC applies, computed in
    floats."""
    scaled = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    weights = np.exp(scaled - scaled.max())
    kept = order[: params.top_k] if params.top_k > 0 else order
    before = np.cumsum([0.0, *weights[kept]])
    kept = [token for token, sum_before in zip(kept, before, strict=False) if sum_before < params.top_p * before[-1]]
    kept = [token for token in kept if weights[token] >= params.min_p * weights.max()]
    top = [token for token in kept if weights[token] >= params.xtc_threshold * weights[kept].sum()]
    return np.isin(np.arange(len(scaled)), [token for token in kept if token not in top[:-1]])


def some_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.5, 1.0, 2.0)),
        top_k=rng.choice((0, 0, 5)),
        top_p=rng.choice((1.0, 0.83)),
        min_p=rng.choice((0.0, 0.013)),
        xtc_probability=1.0,
        xtc_threshold=rng.choice((0.03, 0.1, 0.3, 0.47)),
    )


def law(module: object = sampler, seeds: int = 40) -> None:
    """Rows with XTC keep the same tokens as numpy; rows without XTC in the same batch stay equal
    bit for bit."""
    for seed in range(seeds):
        rng = random.Random(seed)
        params = [some_params(rng) if place % 2 else SamplingParams(top_k=3) for place in range(6)]
        logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)) * 2
        state = staged([(each, seed) for each in params], range(6))
        found = module.Sampler(40, "cpu").process(logits, state)  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.equal(found[::2], logits[::2])
        for place in (1, 3, 5):
            wanted = by_numpy(logits[place].numpy(), params[place])
            assert np.array_equal(found[place].isfinite().numpy(), wanted), (seed, place)
            assert torch.equal(found[place][wanted], logits[place][wanted])


def test_the_candidates_are_those_of_numpy() -> None:
    law()


@pytest.mark.parametrize(
    ("module", "sound", "defect"),
    [
        (sampler, "if state.xtc is not None:", "if False:"),
        (sampler, "top_p=xtc.top_p", "top_p=None"),
        (sampler, "dropped | (gaps == LIMIT)", "dropped"),
        (sampler, "chosen.amax(-1), narrowed", "chosen.amax(-1), replace(narrowed, scale=narrowed.scale * 2)"),
        (xtc, "tables.ids != kept", "tables.ids >= 0"),
        (xtc, "top & (gaps == last)", "top"),
        (xtc, "least[:, None]) & (gaps < LIMIT)", "least[:, None] // 2) & (gaps < LIMIT)"),
    ],
)
def test_the_law_catches_a_planted_defect(module: object, sound: str, defect: str) -> None:
    broken = planted(module, sound, defect)  # pyright: ignore[reportArgumentType]
    if module is xtc:
        whole = planted(sampler, "class SamplingState(", "class SamplingState(")
        whole.left_out = broken.left_out
        broken = whole
    with pytest.raises(AssertionError):
        law(broken)


def test_of_equals_the_highest_id_stays_and_without_a_threshold_all_are_top() -> None:
    tables = make_race_tables(6, "cpu")
    gaps = torch.tensor(
        [[0, 0, LIMIT, 0, 9 << 16, LIMIT], [0, 1 << 20, LIMIT - 1, LIMIT, LIMIT, LIMIT]], dtype=torch.int32
    )
    shares = torch.tensor([1 << 22, 0], dtype=torch.int32)
    assert xtc.top_tokens(gaps, shares, tables).tolist() == [
        [True, True, False, False, False, False],
        [True, True, False, False, False, False],
    ]


def test_a_draw_is_the_references_whoever_is_beside_it() -> None:
    rng = random.Random(3)
    logits = torch.randn(24, 50, generator=torch.Generator().manual_seed(3)) * 2
    params = [
        SamplingParams(
            xtc_probability=rng.choice((0.0, 0.5, 1.0)),
            xtc_threshold=0.02,
            top_p=0.9,
            temperature=rng.choice((0.0, 1.1)),
        )
        for _ in range(24)
    ]
    rows = [(each, rng.getrandbits(64), place % 3) for place, each in enumerate(params)]
    found = drawn(logits, rows, range(24)).token_ids.tolist()
    assert found == [reference_draw(logits[place].tolist(), *row, place)[0] for place, row in enumerate(rows)]
    assert any(
        token != reference_draw(logits[place].tolist(), SamplingParams(temperature=1.1, top_p=0.9), *row[1:], place)[0]
        for place, (token, row) in enumerate(zip(found, rows, strict=True))
        if row[0].excludes_top
    )
    alone = [drawn(logits[place : place + 1], [row], [place]).token_ids.item() for place, row in enumerate(rows)]
    assert alone == found


def test_the_coin_falls_as_often_as_it_should_and_tells_nothing_of_the_token() -> None:
    positions = torch.arange(1 << 14, dtype=torch.int32)
    keys = row_keys(
        torch.tensor(SamplingBatch.from_params([(SamplingParams(), 9)]).seed_words).expand(len(positions), 2), positions
    )
    tossed = coins(keys)
    assert [coin(row_key(9, 0, place)) for place in range(20)] == tossed[:20].tolist()
    assert tossed.min() >= 0 and tossed.max() < 1 << 24
    shares = [(tossed < share * (1 << 24)).float().mean().item() for share in (0.1, 0.5, 0.9)]
    assert np.allclose(shares, (0.1, 0.5, 0.9), atol=0.015)
    state = staged([(SamplingParams(), 9)] * len(positions), positions)
    tokens = Sampler(2, "cpu").sample(torch.zeros(len(positions), 2), state).token_ids
    for token in (0, 1):
        assert abs((tossed[tokens == token] < 1 << 23).float().mean().item() - 0.5) < 0.02


def test_sums_without_integers_of_64_bits_are_the_same() -> None:
    rng = np.random.default_rng(5)
    for size in (1, 7, 5000):
        weights = torch.tensor(rng.integers(0, (1 << 30) + 1, (9, size)), dtype=torch.int32)
        share = torch.tensor(rng.integers(0, (1 << 24) + 1, 9), dtype=torch.int32)
        wide, narrow = (cutoffs.weight_of_share(weights, share, is_narrow) for is_narrow in (False, True))
        assert torch.equal(wide, narrow)
        exact = [-(-int(row.long().sum()) * int(part) >> 24) for row, part in zip(weights, share, strict=True)]
        assert wide.tolist() == [min(each, 2**31 - 1) for each in exact]
    assert narrow_sums.MOST == 2**31 - 1 and gumbel_race.MAX_VOCAB == 1 << 22


@pytest.mark.parametrize(
    "given", [{"xtc_probability": 0.0}, {"temperature": 0.0}, {"xtc_threshold": 0.51}, {"top_k": 1}]
)
def test_where_it_leaves_out_nothing_nothing_runs(given: dict[str, float]) -> None:
    params = SamplingParams(**{"xtc_probability": 1.0, **given})  # pyright: ignore[reportArgumentType]
    assert not params.excludes_top and not SamplingBatch.from_params([(params, 1)]).needs.any_xtc


def test_bad_rows_stay_bad() -> None:
    logits = torch.zeros(3, 5)
    logits[0, 2], logits[1] = math.nan, -math.inf
    found = drawn(logits, [(SamplingParams(xtc_probability=1.0, xtc_threshold=0.1), 1)] * 3, range(3))
    assert found.bad_rows.tolist() == [True, True, False] and found.token_ids.tolist() == [0, 0, 4]
