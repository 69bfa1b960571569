"""Proposals of several layers, a token each, in whole engines: every one is drawn of what dense torch gives on the text that came
out, whatever was accepted before, and none changes a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglcore.runtime.speculative.heads import MultiHeadDrafter
from tests.checkpoints import llama
from tests.drafts import TARGET, DenseHeads, next_tokens
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.test_draft_laws import TOLERANCE, Recording, Step, features_of
from tests.laws.test_speculative_laws import CONTEXT, VOCABULARY

HEADS = 3
Made = tuple[Any, Path, DenseHeads]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A target, its folder, and the layers in it that propose."""
    target = llama(**TARGET, max_position_embeddings=CONTEXT, vocab_size=VOCABULARY)
    folder = tmp_path_factory.mktemp("heads")
    return target, folder, next_tokens(target, folder, llama, HEADS)


def furthest(target: Any, dense: DenseHeads, tokens: list[int], steps: Sequence[Step]) -> float:
    """The largest difference of log-probabilities. A step behind the end of a text goes on with what nobody sees."""
    features, worst, compared = features_of(target, tokens, "mtp"), 0.0, 0
    for cells, _, logprobs, proposals in steps:
        if cells < len(tokens):
            wanted = dense.propose(tokens[1 : cells + 1], features[:cells], proposals[: len(logprobs) - 1])
            worst, compared = max(worst, float((logprobs - wanted).abs().max())), compared + 1
    assert compared > 1
    return worst


def difference(made: Made, **settings: Any) -> float:
    """Of texts of one engine, of which the second begins as the first."""
    target, folder, dense = made
    given = {"draft_tokens": HEADS, "max_batch_tokens": 8, "scramble_pages": 2, **settings}
    engine = TokenEngine(folder, speculative="mtp", **given)
    assert isinstance(engine.worker.drafter, MultiHeadDrafter)  # type: ignore[attr-defined]
    recording: Any = Recording(engine.worker.drafter)  # type: ignore[attr-defined]
    engine.worker.drafter = recording  # type: ignore[attr-defined]
    first, other = random_prompts(5, [21, 6])
    worst = 0.0
    try:
        for prompt in (first, [*first[:18], 3], other):
            recording.steps.clear()
            (result,) = engine.run([prompt], 16, temperature=1.0)
            worst = max(worst, furthest(target, dense, prompt + result.tokens, recording.steps))
        assert engine.scheduler.stats().hit_tokens > 0
    finally:
        engine.worker.close()
    return worst


def test_proposals_are_drawn_of_what_dense_torch_gives_on_the_text(made: Made, graph: str) -> None:
    found = difference(made, graph=graph)
    print("DIFF", found)
    assert found < TOLERANCE
