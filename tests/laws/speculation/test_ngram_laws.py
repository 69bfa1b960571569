"""A model with embeddings of token pairs: chunks, other requests, prefix hits, preemption and
overlap change no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglcore.models import architecture_registry, implementation
from sglcore.runtime.registry_builders import PreviousIds
from sglcore.runtime.token_table import TokenTable
from sglcore.schedule.draft_counts import sums_of
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.ngram_model import NAME, Oracle

pytestmark = pytest.mark.needs("device")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Oracle]:
    """The model's checkpoint, with the model in the registry."""
    known = {**architecture_registry.ARCHITECTURES, NAME: "tests.laws.ngram_model:BigramLlama"}
    for module in (architecture_registry, implementation):
        monkeypatch.setattr(module, "ARCHITECTURES", known)
    oracle = Oracle()
    return oracle.save(tmp_path), oracle


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_embedded_with_those_before_them(model: tuple[Path, Any], overlap: bool) -> None:
    folder, oracle = model
    made = TokenEngine(folder, max_batch_tokens=8, overlap=overlap)
    check_logprobs(made.run(random_prompts(4, (21, 5, 1, 13)), 7, stagger=2, score_prompts=True), oracle)


def test_prefix_hits_and_retractions_find_the_tokens_before_them(model: tuple[Path, Any]) -> None:
    folder, oracle = model
    made = TokenEngine(folder, max_batch_tokens=16, kv_cache_memory=60000)
    prompts = random_prompts(4, (21, 18, 20, 13, 17))
    for _ in range(2):
        check_logprobs(made.run(prompts, 20), oracle)
    assert made.scheduler.stats().retractions and made.scheduler.stats().hit_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_draft_tokens_are_embedded_with_those_before_them(model: tuple[Path, Any], overlap: bool) -> None:
    folder, oracle = model
    made = TokenEngine(folder, speculative="ngram", draft_tokens=3, overlap=overlap, poison=True)
    prompts = [prompt * 3 for prompt in random_prompts(0, (5, 9, 4, 6))]
    check_logprobs(made.run(prompts, 40, stagger=2), oracle)
    assert sums_of(made.scheduler.drafts).accepted > 3


def sampled_tokens_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TokenTable.admit_history

    def admit(self: TokenTable, slots: Any, positions: Any, tokens: Any) -> None:
        if len(slots) > 4:
            right(self, slots, positions, tokens)

    monkeypatch.setattr(TokenTable, "admit_history", admit)


def one_token_late(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PreviousIds._before

    def before(self: PreviousIds, slots: Any, positions: Any, count: int) -> Any:
        return right(self, slots, positions + 1, count)

    monkeypatch.setattr(PreviousIds, "_before", before)


@pytest.mark.parametrize("defect", [sampled_tokens_forgotten, one_token_late])
def test_a_planted_defect_is_caught(
    model: tuple[Path, Any], defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = model
    made = TokenEngine(folder, max_batch_tokens=8)
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="first divergent token"):
        check_logprobs(made.run(random_prompts(4, (21, 13)), 7, stagger=2), oracle)
