"""Draft tokens with grammars: each draft token that a grammar allows gets a mask, and text and
log-probabilities equal plain decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from sglcore.conformance.inputs.hashed_grammar import HashedMatcher, follows
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker, VerifiedRows
from sglcore.schedule.batch_builder import BatchBuilder
from sglcore.schedule.request import Request
from sglcore.step import verification_rows
from sglcore.worker.schedule_batch import ScheduleBatch
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine
from tests.laws.speculation import test_speculative_laws as laws
from tests.laws.speculation.test_speculative_laws import PROMPTS, VOCABULARY, folder
from tests.laws.speculation.texts import TOKENS, Ran, check_same
from tests.runtime.speculation.test_speculative_length import AtRandom

__all__ = ["folder"]

GRAMMARS = (11, None, 12, 13, 14)
"""The seed of each prompt's grammar, or None. The request with stop tokens draws them where its
grammar allows them."""


CHANGING = (12, 14)
"""The grammars that change logits too."""


class Matching(HashedMatcher):
    """Knows its request, so that it can tell draft tokens from emitted ones."""

    def __init__(self, seed: int, request: Request) -> None:
        super().__init__(seed, VOCABULARY)
        self._request = request


def run(engine: TokenEngine, kind: type[Matching] = Matching) -> Ran:
    """Run the prompts together, each with its own sampling and grammar."""

    def prepare(requests: list[Request]) -> None:
        for request, seed in zip(requests, GRAMMARS, strict=True):
            matcher = None if seed is None else kind(seed, request)
            request.matcher, request.change = matcher, matcher if seed in CHANGING else None

    return laws.run(engine, prepare=prepare)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Ran:
    """The results without draft tokens, which match the grammars."""
    engine = TokenEngine(folder, graph="off")
    try:
        found = run(engine)
    finally:
        engine.worker.close()
    for seed, tokens, reason in zip(GRAMMARS, found.tokens, found.reasons, strict=True):
        assert seed is None or follows(seed, VOCABULARY, tokens[: len(tokens) - (reason == "stop")])
    return found


@pytest.fixture
def engines(folder: Path, plain: Ran) -> Iterator[Callable[..., TokenEngine]]:
    """Make engines with drafters, and close them."""
    made: list[TokenEngine] = []

    def make(drafter: str, tokens: int = 3, **settings: Any) -> TokenEngine:
        given = {"speculative": "ngram", "draft_tokens": tokens, "graph_buckets": (2, 5), **settings}
        engine = TokenEngine(folder, **given)
        made.append(engine)
        assert isinstance(engine.worker, SpeculativeWorker)
        if drafter != "ngram":
            whole = Texts([prompt + output for prompt, output in zip(PROMPTS, plain.tokens, strict=True)])
            engine.worker.drafter = DRAFTERS[drafter](tokens, whole, VOCABULARY)
        return engine

    yield make
    for engine in made:
        engine.worker.close()


@pytest.mark.parametrize("drafter", ["ngram", *DRAFTERS])
def test_a_grammar_and_proposals_change_no_text(
    engines: Callable[..., TokenEngine], plain: Ran, drafter: str, graph: str
) -> None:
    check_same(run(engines(drafter, graph=graph, overlap=True, poison=True)), plain)


@pytest.mark.needs("device")
@pytest.mark.parametrize("drafter", ["ngram", "guessing"])
def test_lengths_that_change_at_random_change_no_text_under_a_grammar(
    engines: Callable[..., TokenEngine], plain: Ran, drafter: str
) -> None:
    engine = engines(drafter, tokens=4, graph="off")
    assert isinstance(engine.worker, SpeculativeWorker)
    engine.worker.length = AtRandom()
    check_same(run(engine), plain)


@pytest.mark.needs("device")
def test_retraction_and_small_pages_change_no_text(engines: Callable[..., TokenEngine], plain: Ran) -> None:
    engine = engines("guessing", graph="off", kv_cache_memory=40 << 10, max_model_len=80, max_batch_tokens=16)
    check_same(run(engine), plain)
    assert engine.scheduler.stats().retractions > 0


@pytest.mark.needs("device")
def test_who_is_right_saves_steps_under_a_grammar_too(engines: Callable[..., TokenEngine], plain: Ran) -> None:
    assert run(engines("oracle", graph="off")).decodes == 1 + -(-(TOKENS - 1) // 4)
    assert run(engines("adversary", graph="off")).decodes == TOKENS


class FailsAhead(Matching):
    """Mutant: fails after one draft token."""

    def fill(self, words: np.ndarray) -> None:
        super().fill(words)
        if len(self._digests) - 1 > len(self._request.output_ids) + 1:
            self.error, words[:] = "it gave up", 0


@pytest.mark.needs("device")
def test_a_grammar_that_fails_along_proposals_fails_no_request(engines: Callable[..., TokenEngine], plain: Ran) -> None:
    found = run(engines("oracle", graph="off"), FailsAhead)
    check_same(found, plain)
    assert found.decodes == 1 + (TOKENS - 1 + 1) // 2


class RollsNothingBack(Matching):
    def rollback(self, count: int) -> None:
        pass


class RollsOneTooFewBack(Matching):
    def rollback(self, count: int) -> None:
        super().rollback(max(count - 1, 0))


class MasksOfTheTokenBefore(BatchBuilder):
    def _add_masks(self, batch: ScheduleBatch) -> None:
        super()._add_masks(batch)
        if batch.masks is not None and batch.mask_nodes is not None:
            later = np.flatnonzero(batch.mask_nodes)
            batch.masks[later] = batch.masks[later - 1]


class MasksOfTheRoot(BatchBuilder):
    def _add_masks(self, batch: ScheduleBatch) -> None:
        super()._add_masks(batch)
        if batch.masks is not None and batch.mask_nodes is not None:
            batch.masks = batch.masks[np.arange(len(batch.masks)) - batch.mask_nodes]


class AddsAtTheRoot(BatchBuilder):
    def _add_masks(self, batch: ScheduleBatch) -> None:
        super()._add_masks(batch)
        if batch.change_nodes is not None:
            batch.change_nodes = np.zeros_like(batch.change_nodes)


class VerifiesWhatHasNoMask(SpeculativeWorker):
    def _place(self, staged: ForwardBatch, rows: VerifiedRows, nodes: Tensor | None) -> None:
        super()._place(staged, rows, None)


MUTANTS: Mapping[str, tuple[type[BatchBuilder] | None, type[SpeculativeWorker] | None, type[Matching]]] = (
    MappingProxyType(
        {
            "rolls nothing back": (None, None, RollsNothingBack),
            "rolls one too few back": (None, None, RollsOneTooFewBack),
            "masks of the token before": (MasksOfTheTokenBefore, None, Matching),
            "masks of the root": (MasksOfTheRoot, None, Matching),
            "adds at the root": (AddsAtTheRoot, None, Matching),
            "verifies what has no mask": (None, VerifiesWhatHasNoMask, FailsAhead),
        }
    )
)


@pytest.mark.needs("device")
@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_defect_is_caught(engines: Callable[..., TokenEngine], plain: Ran, name: str) -> None:
    builder, worker, matcher = MUTANTS[name]
    engine = engines("guessing" if worker is None else "oracle", graph="off")
    engine.scheduler._builder.__class__ = builder or BatchBuilder
    engine.worker.__class__ = worker or SpeculativeWorker
    with pytest.raises(AssertionError):
        check_same(run(engine, matcher), plain)


@pytest.mark.needs("device")
def test_masks_of_what_is_not_verified_show(
    engines: Callable[..., TokenEngine], plain: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    def every(batch: ScheduleBatch, width: int) -> tuple[Any, Any]:
        if batch.mask_rows is None or batch.mask_nodes is None:
            return None, None
        return batch.mask_rows * width + np.minimum(batch.mask_nodes, width - 1), batch.masks

    monkeypatch.setattr(verification_rows, "_wide_masks", every)
    engine = engines("guessing", tokens=4, graph="off")
    assert isinstance(engine.worker, SpeculativeWorker)
    engine.worker.length = AtRandom()
    with pytest.raises(AssertionError):
        check_same(run(engine), plain)
