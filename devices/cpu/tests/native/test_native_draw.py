"""The native draw gives exactly the sampler's tokens, for all vocabularies, cut-offs and ties."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from devices.cpu.tests.native.guarded import GuardedResults, guarded_copy
from sglcore.sampling.gumbel_race import gumbel_noise, make_race_tables, row_keys
from sglcore.sampling.noise import fixed_min_p
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.reference_sampler import golden_draws
from sglcore.sampling.sampler import SamplingState, draw_rows
from sglcore_cpu.kernels.draw import NativeDraw
from sglcore_cpu.native import Engine
from tests.sampling.rows import at_min_p, signed_zeros, staged

BLOCK = 256
"""The kernel keeps the largest logit of every block of this many tokens."""
VOCABULARIES = (1, 5, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 5 * BLOCK, 9001)


def some_state(rng: random.Random, count: int) -> SamplingState:
    """Make random parameters, seeds and positions."""
    rows = [
        (
            SamplingParams(
                temperature=rng.choice((0.0, 0.3, 1.0, 1.0, 2.0)),
                top_k=rng.choice((-1, -1, 1, 3, 50, 700)),
                top_p=rng.choice((1.0, 1.0, 0.5, 0.9, 0.999, 0.01)),
                min_p=rng.choice((0.0, 0.0, 0.1, 0.9)),
            ),
            rng.randrange(1 << 60),
        )
        for _ in range(count)
    ]
    return staged(rows, [rng.randrange(1 << 20) for _ in rows])


def some_logits(rng: random.Random, count: int, vocab: int) -> Tensor:
    """Make flat or peaked logits, or ones with many ties; some rows are bad, have one candidate, or
    have most tokens masked."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    logits = torch.randn(count, vocab, generator=generator) * rng.choice((0.0, 1e-6, 0.1, 1, 3, 5, 40))
    if rng.random() < 0.4:
        logits = logits.round()
    row = logits[rng.randrange(count)]
    kind = rng.randrange(5)
    if kind == 0:
        row[rng.randrange(vocab)] = rng.choice((torch.nan, -torch.nan, torch.inf, -torch.inf, -0.0))
    elif kind == 1:
        row.fill_(-torch.inf)
        row[rng.randrange(vocab)] = rng.choice((0.0, -torch.inf, 3.0))
    elif kind == 2:
        row[torch.rand(vocab, generator=generator) < 0.95] = -torch.inf
    return logits.to(rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)))


def assert_same(engine: Engine, logits: Tensor, state: SamplingState, offset: int = 0, gap: int = 0) -> None:
    """Check that the native draw gives torch's tokens and bad rows and writes nothing else."""
    tables = make_race_tables(logits.shape[1], "cpu")
    tokens, bad = draw_rows(logits, state, tables)
    placed, check = guarded_copy(logits, offset, gap)
    with GuardedResults():
        found, found_bad = NativeDraw(engine)(placed, state, tables)
        assert found.dtype == torch.int32 and found_bad.dtype == torch.bool
        assert torch.equal(found_bad, bad) and torch.equal(found, tokens)
    check()
    assert torch.equal(placed.view(torch.uint8), guarded_copy(logits)[0].view(torch.uint8))


@pytest.mark.parametrize("part", range(3))
def test_every_token_is_the_samplers(engine: Engine, part: int) -> None:
    for seed in range(60):
        rng = random.Random(1000 * part + seed)
        count, vocab = rng.choice((1, 1, 2, 5)), rng.choice(VOCABULARIES)
        assert_same(engine, some_logits(rng, count, vocab), some_state(rng, count), rng.randrange(9), rng.randrange(3))


@pytest.mark.parametrize("vocab", [151_936, 200_000])
def test_a_large_vocabulary_is_drawn_from_as_the_sampler_does(engine: Engine, vocab: int) -> None:
    rng = random.Random(vocab)
    for _ in range(3):
        assert_same(engine, some_logits(rng, 2, vocab), some_state(rng, 2))


def ties(*params: dict) -> tuple[Tensor, SamplingState]:
    """Equal logits in every block, so that every cut-off is among equals; four draws of each
    parameter set."""
    rows = [each for each in params for _ in range(4)]
    logits = torch.full((len(rows), 3 * BLOCK + 7), -20.0)
    logits[:, ::101] = 1.0
    return logits, staged([(SamplingParams(temperature=1.0, **each), 3) for each in rows], range(len(rows)))


def best_is_not_first() -> tuple[Tensor, SamplingState]:
    """A token a little below the best also has a gap of 0, because gaps are rounded, and a lower
    id: top_k = 1 keeps only that token."""
    row = torch.tensor([-9.0, 0.999999, 1.0, 0.5])
    return row.repeat(8, 1), staged([(SamplingParams(temperature=1.0, top_k=1), 6)] * 8, range(8))


def wide_share() -> tuple[Tensor, SamplingState]:
    """So many tokens are more than 8 nats below the best that top_p needs some of them; three rows
    need few. In the other rows, 30 % of the draws without top_p would take a token beyond its
    share."""
    logits = torch.full((40, 40 * BLOCK), -9.5)
    logits[:, 77], logits[:3, 78] = 0.0, 9.0
    return logits, staged([(SamplingParams(temperature=1.0, top_p=0.7), 8)] * 40, range(40))


def ties_at_min_p() -> tuple[Tensor, SamplingState]:
    """The cut-off of top_k is among tokens with the largest gap that min_p keeps."""
    row = torch.full((9,), -fixed_min_p(0.2) / 65536)
    row[4] = 0.0
    return row.repeat(40, 1), staged([(SamplingParams(temperature=1.0, top_k=3, min_p=0.2), 5)] * 40, range(40))


def narrow_wins() -> tuple[Tensor, SamplingState]:
    """The second token wins by 1 / 65536. Its noise is nearly a multiple of ln 2, where the
    kernel's bound of the noise is tight."""
    positions = torch.arange(1 << 20, dtype=torch.int32)
    tables, state = make_race_tables(2, "cpu"), staged([(SamplingParams(temperature=1.0), 9)], [0])
    keys = row_keys(state.seed_words.expand(len(positions), 2), positions)
    first, second = gumbel_noise(keys, tables.hashed_ids, tables.gumbel).T
    octave = math.log(2) * 65536
    is_tight = (second / octave - (second / octave).round()).abs() < 10 / octave
    chosen = positions[is_tight & (second > 4 * octave) & (second > first)]
    assert len(chosen) >= 20
    logits = torch.zeros(len(chosen), 2)
    logits[:, 1] = (first - second + 1)[chosen] / 65536
    return logits, staged([(SamplingParams(temperature=1.0), 9)] * len(chosen), chosen)


CASES: dict[str, Callable[[], tuple[Tensor, SamplingState]]] = {
    "top-k among equals": lambda: ties({"top_k": 1}, {"top_k": 4}, {"top_k": 7}),
    "top-p among equals": lambda: ties({"top_p": 0.5}, {"top_p": 0.05}),
    "top-p after top-k": lambda: ties({"top_k": 3, "top_p": 0.5}, {"top_k": 4, "top_p": 1.0}),
    "min-p after top-k": lambda: ties({"top_k": 3, "min_p": 0.5}, {"top_k": 9, "min_p": 0.1}),
    "zeros of both signs": lambda: signed_zeros(BLOCK),
    "gaps at min_p": at_min_p,
    "the best is not the first": best_is_not_first,
    "a share of far tokens": wide_share,
    "ties at min_p": ties_at_min_p,
    "narrow wins": narrow_wins,
}


@pytest.mark.parametrize("name", CASES)
def test_cuts_and_ties_are_the_samplers(engine: Engine, name: str) -> None:
    assert_same(engine, *CASES[name]())


@pytest.mark.parametrize("scale", [torch.inf, torch.nan, 0.0, 1e-30, 1e30])
def test_odd_temperatures_are_drawn_as_the_sampler_does(engine: Engine, scale: float) -> None:
    rng = random.Random(3)
    for _ in range(4):
        state = some_state(rng, 3)
        assert_same(engine, some_logits(rng, 3, 1000), replace(state, scale=torch.full((3,), scale)))


@pytest.mark.parametrize("field", ["top_k", "top_p", "min_p"])
def test_a_cut_that_leaves_nobody_is_the_samplers(engine: Engine, field: str) -> None:
    rng = random.Random(4)
    for value in (0, -1):
        state = some_state(rng, 3)
        limits = torch.full((3,), value, dtype=torch.int32)
        assert_same(engine, some_logits(rng, 3, 700), replace(state, **{field: limits}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_golden_draws_are_reproduced(engine: Engine, dtype: torch.dtype) -> None:
    for case in golden_draws():
        logits = torch.tensor([case.logits]).to(dtype)
        if not torch.equal(logits.float(), torch.tensor([case.logits])):
            continue
        state = staged([(case.params, case.seed, case.sample_index)], [case.position])
        tokens, bad = NativeDraw(engine)(logits, state, make_race_tables(logits.shape[1], "cpu"))
        assert int(tokens[0]) == case.token and not bad[0], case.name


def test_no_rows_draw_nothing(engine: Engine) -> None:
    tokens, bad = NativeDraw(engine)(torch.zeros(0, 9), staged([], []), make_race_tables(9, "cpu"))
    assert tokens.shape == bad.shape == (0,)


def test_strided_vocabularies_go_to_the_sampler(engine: Engine) -> None:
    state = staged([(SamplingParams(temperature=1.0), 1)] * 3, range(3))
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)).T
    tables = make_race_tables(50, "cpu")
    assert torch.equal(NativeDraw(engine)(logits, state, tables)[0], draw_rows(logits.contiguous(), state, tables)[0])
