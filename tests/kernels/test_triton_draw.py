"""Sampling in Triton gives the same tokens as the torch sampler bit by bit, for any vocabulary,
cut-offs and ties."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.runtime.kernels.triton import Tuning, race, sampling
from sglcore.sampling.gumbel_race import make_race_tables
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.sampler import Sampler, SamplingState, draw_rows
from tests.kernels.guards import Guards, mutated
from tests.sampling.rows import at_min_p, signed_zeros, staged

BLOCK = 64
SMALL = Tuning(draw_tokens=BLOCK)
VOCABULARIES = (1, 5, 64, 65, 200)


def some_rows(rng: random.Random, count: int, greedy: bool = True) -> list[tuple[SamplingParams, int]]:
    """Return random parameters and seeds."""
    temperatures = (0.0, 0.5, 1.0, 2.0) if greedy else (0.5, 1.0, 2.0)
    return [
        (
            SamplingParams(
                temperature=rng.choice(temperatures),
                top_k=rng.choice((-1, 1, 3, 50)),
                top_p=rng.choice((1.0, 0.5, 0.9, 0.01)),
                min_p=rng.choice((0.0, 0.0, 0.1)),
            ),
            rng.randrange(1 << 60),
        )
        for _ in range(count)
    ]


def some_logits(rng: random.Random, count: int, vocab: int) -> Tensor:
    """Return random logits: flat, peaked or full of ties; some rows are bad or have only one
    candidate."""
    logits = torch.randn(count, vocab + 3, generator=torch.Generator().manual_seed(rng.randrange(1 << 31)))[:, 1:-2]
    logits = logits * rng.choice((0.1, 1, 5, 40))
    if rng.random() < 0.5:
        logits = logits.round()
    if rng.random() < 0.3:
        logits[0, rng.randrange(vocab)] = rng.choice((torch.nan, torch.inf, -torch.inf, -0.0))
    if rng.random() < 0.2:
        logits[count - 1] = -torch.inf
    return logits.to(rng.choice((torch.float32, torch.bfloat16, torch.float16)))


def assert_same(module: ModuleType, guards: Guards, logits: Tensor, state: SamplingState) -> None:
    """The tokens and bad rows equal those in torch."""
    tables = make_race_tables(logits.shape[1], "cpu")
    tokens, bad = draw_rows(logits, state, tables)
    found, found_bad = module.draw(guards.place(logits), state, tables, SMALL)
    assert torch.equal(found, tokens) and torch.equal(found_bad, bad)
    assert found.dtype == torch.int32 and found_bad.dtype == torch.bool
    guards.check()


@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_the_samplers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, guards = random.Random(seed), Guards(monkeypatch)
    count, vocab = rng.choice((1, 4)), VOCABULARIES[seed % len(VOCABULARIES)]
    state = staged(some_rows(rng, count), [rng.randrange(1000) for _ in range(count)])
    assert_same(sampling, guards, some_logits(rng, count, vocab), state)


def ties(*params: dict) -> tuple[Tensor, SamplingState]:
    """Five equal tokens over three blocks, so that every cut falls among them; four draws of
    each."""
    rows = [each for each in params for _ in range(4)]
    logits = torch.full((len(rows), 2 * BLOCK + 7), -20.0)
    logits[:, ::29] = 1.0
    return logits, staged([(SamplingParams(temperature=1.0, **each), 3) for each in rows], range(len(rows)))


CASES = {
    "top-k among equals": lambda: ties({"top_k": 1}, {"top_k": 4}),
    "top-p among equals": lambda: ties({"top_p": 0.5}, {"top_p": 0.05}),
    "top-p after top-k": lambda: ties({"top_k": 3, "top_p": 0.5}, {"top_k": 4, "top_p": 1.0}),
    "zeros of both signs": lambda: signed_zeros(BLOCK),
    "gaps at min_p": at_min_p,
}


@pytest.mark.parametrize("name", CASES)
def test_cuts_and_ties_are_the_samplers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(sampling, Guards(monkeypatch), *CASES[name]())


def test_no_rows_draw_nothing() -> None:
    tokens, bad = sampling.draw(torch.zeros(0, 9), staged([], []), make_race_tables(9, "cpu"), SMALL)
    assert tokens.shape == bad.shape == (0,)


def test_a_sampler_takes_it_in_place_of_its_own() -> None:
    rng = random.Random(5)
    state, logits = staged(some_rows(rng, 3), [1, 2, 3]), some_logits(rng, 3, 70)
    own = Sampler(70, "cpu", draw=sampling.draw).sample(logits, state)
    assert torch.equal(own.token_ids, Sampler(70, "cpu").sample(logits, state).token_ids)


K, P, BOTH, ZEROS, EDGE = CASES
MUTANTS = (
    (sampling, "ids < vocab", "ids <= vocab", ZEROS),
    (sampling, "> allowed", ">= allowed", K),
    (sampling, "part < tl.program_id(1)", "part <= tl.program_id(1)", K),
    (sampling, "tl.where(column < reached, sums, 0)", "tl.where(column <= reached, sums, 0)", K),
    (sampling, "gap < tl.load(cut", "gap <= tl.load(cut", BOTH),
    (sampling, "+ tl.where(here, kept, 0)", "", BOTH),
    (sampling, "left + each - 1", "left", P),
    (sampling, "token = tl.where(tl.load(greedy + row) != 0, first, token)", "", ZEROS),
    (sampling, "gap <= tl.load(min_p + row)", "gap < tl.load(min_p + row)", EDGE),
    (race, "ids ^ LAST_ID", "ids", ZEROS),
    (race, "tl.where(x == 0, 0.0, x)", "x", ZEROS),
    (race, "mix32(second + first) | 1", "mix32(second + first)", EDGE),
    (race, "words >> 15", "words >> 14", EDGE),
    (race, "(gap + TO_INTEGER)", "(gap + 0.25 + TO_INTEGER)", EDGE),
)


@pytest.mark.parametrize(
    ("module", "old", "new", "case"), MUTANTS, ids=lambda value: str(getattr(value, "__name__", value))
)
def test_a_defect_is_caught(
    module: ModuleType, old: str, new: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    defect = mutated(module, tmp_path, old, new)
    if module is race:
        defect = mutated(sampling, tmp_path, f"from {race.__name__} import", f"from {defect.__name__} import")
    with pytest.raises(AssertionError):
        assert_same(defect, guards, *CASES[case]())
