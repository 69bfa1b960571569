"""The draw in Triton gives the sampler's tokens to the bit, whatever the vocabulary, the cut-offs and the ties."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs the library triton")

from sglcore.runtime.kernels.triton import Tuning, drawing, race
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.race import gumbel_noise, make_race_tables, row_keys
from sglcore.sampling.sampler import Sampler, SamplingState, draw_rows
from tests.kernels.guards import Guards, mutated
from tests.sampling.rows import staged

BLOCK = 64
SMALL = Tuning(draw_tokens=BLOCK)
VOCABULARIES = (1, 5, 64, 65, 200)


def some_rows(rng: random.Random, count: int, greedy: bool = True) -> list[tuple[SamplingParams, int]]:
    """Random parameters and seeds."""
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
    """Random logits: flat, peaked or full of ties; some rows are bad or have only one candidate."""
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
    """The same tokens and bad rows as in torch."""
    tables = make_race_tables(logits.shape[1], "cpu")
    tokens, bad = draw_rows(logits, state, tables)
    found, found_bad = module.draw(guards.place(logits), state, tables, SMALL)
    assert torch.equal(found, tokens) and torch.equal(found_bad, bad)
    assert found.dtype == torch.int32 and found_bad.dtype == torch.bool
    guards.check()


@pytest.mark.parametrize("seed", range(12))
def test_every_token_is_the_samplers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, guards = random.Random(seed), Guards(monkeypatch)
    count, vocab = rng.choice((1, 4)), VOCABULARIES[seed % len(VOCABULARIES)]
    state = staged(some_rows(rng, count), [rng.randrange(1000) for _ in range(count)])
    assert_same(drawing, guards, some_logits(rng, count, vocab), state)


@pytest.mark.parametrize("params", [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.4}, {"min_p": 0.2}], ids=str)
def test_ties_at_a_cut_go_by_the_lower_id_across_blocks(params: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(6, 3 * BLOCK + 7)
    logits[:, ::29] = 1.0
    rows = [(SamplingParams(temperature=1.0, **params), seed) for seed in range(6)]
    assert_same(drawing, Guards(monkeypatch), logits, staged(rows, range(6)))


def test_the_stored_draws_are_reproduced() -> None:
    """The draws that every device must give."""
    golden = json.loads((Path(drawing.noise.__file__).parent / "golden.json").read_text())
    keys = row_keys(torch.tensor([[3, 5]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32))
    tables = make_race_tables(50, "cpu")
    assert golden and gumbel_noise(keys, tables.hashed_ids, tables.gumbel).shape == (1, 50)


def test_no_rows_draw_nothing() -> None:
    tokens, bad = drawing.draw(torch.zeros(0, 9), staged([], []), make_race_tables(9, "cpu"), SMALL)
    assert tokens.shape == bad.shape == (0,)


def test_a_sampler_takes_it_in_place_of_its_own() -> None:
    rng = random.Random(5)
    state, logits = staged(some_rows(rng, 3), [1, 2, 3]), some_logits(rng, 3, 70)
    own = Sampler(70, "cpu", draw=drawing.draw).sample(logits, state)
    assert torch.equal(own.token_ids, Sampler(70, "cpu").sample(logits, state).token_ids)


MUTANTS = (
    (drawing, "ids < vocab", "ids <= vocab"),
    (drawing, "> allowed", ">= allowed"),
    (drawing, "part < tl.program_id(1)", "part <= tl.program_id(1)"),
    (drawing, "running < wanted", "running <= wanted"),
    (drawing, "gap < tl.load(cut", "gap <= tl.load(cut"),
    (drawing, "+ tl.where(here, kept, 0)", ""),
    (drawing, "left + each - 1", "left"),
    (drawing, "token = tl.where(tl.load(greedy + row) != 0, first, token)", ""),
    (drawing, "gap <= tl.load(min_p + row)", "gap < tl.load(min_p + row)"),
    (race, "ids ^ LAST_ID", "ids"),
    (race, "tl.where(x == 0, 0.0, x)", "x"),
    (race, "mix32(second + first) | 1", "mix32(second + first)"),
    (race, "ends * -FOLD", "ends * FOLD"),
    (race, "(gap + TO_INTEGER)", "(gap + 0.25 + TO_INTEGER)"),
)


@pytest.mark.parametrize(("module", "old", "new"), MUTANTS, ids=lambda value: str(getattr(value, "__name__", value)))
def test_a_defect_is_caught(
    module: ModuleType, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(monkeypatch)
    defect = mutated(module, tmp_path, old, new)
    if module is race:
        defect = mutated(drawing, tmp_path, f"from {race.__name__} import", f"from {defect.__name__} import")
    with pytest.raises(AssertionError):
        for seed in range(40):
            rng = random.Random(seed)
            vocab = rng.choice((65, 90))
            logits = some_logits(rng, 6, vocab)
            if seed % 2:
                # Zeros of both signs are best, and rounding decides ties.
                logits = torch.where(torch.rand(logits.shape) < 0.5, 0.0, -0.0) - (torch.rand(logits.shape) < 0.5).float()
            assert_same(defect, guards, logits, staged(some_rows(rng, 6), [rng.randrange(1000) for _ in range(6)]))
