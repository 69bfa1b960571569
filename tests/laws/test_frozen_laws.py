"""Proposals of a draft that keeps nothing, in whole engines: they are drawn of what transformers' layers give over what the target
keeps, change no text, and write to nobody's cells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkpoints import gemma3, llama, save
from tests.drafts import TARGET
from tests.frozen_drafts import DenseFrozen, frozen
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.test_draft_laws import TOLERANCE, Recording, Step
from tests.laws.test_speculative_laws import CONTEXT, VOCABULARY
from tests.models.test_transformers_models import sizes_of
from tests.models.transformers_cases import tiny_model

TOKENS = 3
FULL = ("full_attention", "full_attention")


class Made(NamedTuple):
    """A target, its folder, and a draft in it."""

    target: Any
    folder: Path
    dense: DenseFrozen


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder = save(target, tmp_path_factory.mktemp("frozen"))
    return Made(target, folder, frozen(target, folder / "draft", FULL, 12, 12))


def furthest(dense: DenseFrozen, tokens: list[int], steps: Sequence[Step]) -> float:
    """The largest difference of log-probabilities. A step behind the end of a text goes on with what nobody sees."""
    worst, compared, before = 0.0, 0, 0
    for cells, _, logprobs, proposals in steps:
        if before < cells < len(tokens):
            before = cells
            wanted = dense.propose(tokens[:cells], tokens[cells], proposals[: TOKENS - 1])
            worst, compared = max(worst, float((logprobs - wanted).abs().max())), compared + 1
    assert compared > 2
    return worst


def difference(made: Made, **settings: Any) -> float:
    """Of texts of one engine, of which the second begins as the first."""
    given = {"draft_tokens": TOKENS, "max_batch_tokens": 8, "scramble_pages": 2, **settings}
    engine = TokenEngine(made.folder, speculative="frozen-mtp", **given)
    recording: Any = Recording(engine.worker.drafter)  # type: ignore[attr-defined]
    engine.worker.drafter = recording  # type: ignore[attr-defined]
    first, other = random_prompts(5, [21, 6])
    worst = 0.0
    try:
        for prompt in (first, [*first[:18], 3], other):
            recording.steps.clear()
            (result,) = engine.run([prompt], 16, temperature=1.0)
            worst = max(worst, furthest(made.dense, prompt + result.tokens, recording.steps))
        assert engine.scheduler.stats().hit_tokens > 0
    finally:
        engine.worker.close()
    return worst


def test_proposals_are_drawn_of_what_transformers_layers_give(made: Made, graph: str) -> None:
    assert difference(made, graph=graph) < TOLERANCE


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A target with layers of both kinds, that with a window before its last."""
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    target = gemma3(num_hidden_layers=4, layer_types=kinds, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder, size = save(target, tmp_path_factory.mktemp("gemma")), target.config.head_dim
    dense = frozen(target, folder / "draft", ("sliding_attention", "sliding_attention", "full_attention"), size, size)
    return Made(target, folder, dense)


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The model that such drafts are made for, by transformers' class, whose layers share keys and values themselves."""
    sizes = {**sizes_of("gemma4_text"), "max_position_embeddings": CONTEXT, "vocab_size": VOCABULARY}
    target = tiny_model("gemma4_text", sizes)
    folder, size = save(target, tmp_path_factory.mktemp("gemma4")), target.config.head_dim
    dense = frozen(target, folder / "draft", ("sliding_attention", "full_attention", "full_attention"), size, 16)
    return Made(target, folder, dense)


@pytest.mark.needs("device")
def test_layers_of_each_kind_read_the_last_of_the_targets(gemma: Made) -> None:
    assert difference(gemma, graph="off") < TOLERANCE


@pytest.mark.needs("device")
def test_layers_read_what_the_targets_own_layers_share(gemma4: Made) -> None:
    assert difference(gemma4, graph="off", model_impl="transformers") < TOLERANCE
