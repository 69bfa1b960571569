"""Sampling that depends on the text, with draft tokens: penalties, bans and random keys are those
of each token's position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sglcore.runtime.sample_step import SampleStep
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.schedule.request import Request
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.speculation.test_speculative_laws import VOCABULARY, folder, run
from tests.laws.speculation.texts import Ran, check_same

__all__ = ["folder"]

WIDTH = 4
PROMPTS = [prompt * 3 for prompt in random_prompts(8, (3, 7, 5, 4, 6, 9))]
"""Repetitive prompts, so that penalties change much."""
SAMPLING: Sequence[dict[str, Any]] = (
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"temperature": 1.0, "seed": 11, "presence_penalty": 2.0, "frequency_penalty": 1.5},
    {"temperature": 0.0, "frequency_penalty": 2.0},
    {"temperature": 1.0, "seed": 12, "min_tokens": 11, "stop_token_ids": list(range(3, 60))},
    {"temperature": 1.0, "seed": 13, "logit_bias": {7: 4.0, 8: 4.0, 9: -100.0}, "top_k": 5, "repetition_penalty": 0.7},
    {"temperature": 2.0, "seed": 14},
)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[TokenEngine]:
    """An engine without draft tokens."""
    engine = TokenEngine(folder, graph="off")
    yield engine
    engine.worker.close()


@pytest.fixture
def proposing(folder: Path) -> Iterator[TokenEngine]:
    """An engine with n-gram drafts, unless a test sets another drafter."""
    engine = TokenEngine(folder, graph="off", speculative="ngram", draft_tokens=WIDTH - 1, poison=True)
    yield engine
    engine.worker.close()


def plant(engine: TokenEngine, drafter: str, wanted: Ran) -> None:
    """Give an engine a drafter that knows the expected texts."""
    texts = Texts([prompt + output for prompt, output in zip(PROMPTS, wanted.tokens, strict=True)])
    assert isinstance(engine.worker, SpeculativeWorker)
    engine.worker.drafter = DRAFTERS[drafter](WIDTH - 1, texts, VOCABULARY)


@pytest.mark.needs("device")
@pytest.mark.parametrize("drafter", ["ngram", *DRAFTERS])
def test_what_depends_on_the_text_is_as_without_proposals(
    plain: TokenEngine, proposing: TokenEngine, drafter: str
) -> None:
    wanted = run(plain, PROMPTS, samplings=SAMPLING)
    if drafter != "ngram":
        plant(proposing, drafter, wanted)
    check_same(run(proposing, PROMPTS, samplings=SAMPLING), wanted)


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_samples_of_one_prompt_are_as_without_proposals(
    plain: TokenEngine, proposing: TokenEngine, overlap: bool
) -> None:
    def lead(requests: list[Request]) -> None:
        for index, request in enumerate(requests[1:], start=1):
            request.leader, request.sample_index, request.request_id = requests[0], index, requests[0].rid

    samples = [{"temperature": 1.2, "top_p": 0.95, "presence_penalty": 0.5, "seed": seed} for seed in range(5)]
    proposing.loop.overlap = overlap
    prompts = [PROMPTS[1]] * len(samples)
    wanted = run(plain, prompts, samplings=samples, prepare=lead)
    check_same(run(proposing, prompts, samplings=samples, prepare=lead), wanted)
    assert len(set(map(tuple, wanted.tokens))) == len(samples)


class PenaltiesOfTheRoot(SampleStep):
    def _penalties(self, known: Any, batch: Any, rows: Any, positions: Tensor) -> Any:
        return super()._penalties(known, batch, rows, _of_the_root(positions) if rows.emitting is None else positions)


class PlacesOfTheRoot(SampleStep):
    def state(self, batch: Any, rows: Any, inputs: Any, arrived: Any, positions: Tensor) -> Any:
        if rows.emitting is None:
            positions = _of_the_root(positions)
        return super().state(batch, rows, inputs, arrived, positions)


class PlacesOffByOne(SampleStep):
    def state(self, batch: Any, rows: Any, inputs: Any, arrived: Any, positions: Tensor) -> Any:
        return super().state(batch, rows, inputs, arrived, positions + (rows.emitting is None))


def _of_the_root(positions: Tensor) -> Tensor:
    return positions.view(-1, WIDTH)[:, :1].expand(-1, WIDTH).reshape(-1)


@pytest.mark.needs("device")
@pytest.mark.parametrize("mutant", [PenaltiesOfTheRoot, PlacesOfTheRoot, PlacesOffByOne])
def test_a_defect_changes_a_text(plain: TokenEngine, proposing: TokenEngine, mutant: type[SampleStep]) -> None:
    wanted = run(plain, PROMPTS, samplings=SAMPLING)
    plant(proposing, "guessing", wanted)
    proposing.worker.sampling.__class__ = mutant
    with pytest.raises(AssertionError):
        check_same(run(proposing, PROMPTS, samplings=SAMPLING), wanted)
