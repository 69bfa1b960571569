"""Draft tokens change no text: with any drafter, sampled or greedy, with every graph kind, with and
without overlap, tokens and log-probabilities equal plain decode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from tests.checkpoints import llama, save
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.speculation import texts
from tests.laws.speculation.texts import TOKENS, Ran, check_same

CONTEXT, VOCABULARY = 128, 97
WIDE = (2, 10, 24)
"""Sizes of decode graphs; verification batches are padded to them."""
PROMPTS = random_prompts(3, (7, 23, 40, 5, 16))


def run(engine: TokenEngine, prompts: Sequence[Sequence[int]] = PROMPTS, *given: Any, **how: Any) -> Ran:
    """Run `PROMPTS` or others; the other arguments are those of `texts.run`."""
    return texts.run(engine, prompts, *given, **how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    return save(llama(max_position_embeddings=CONTEXT, vocab_size=VOCABULARY), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Ran:
    """The results without draft tokens."""
    engine = TokenEngine(folder, graph="off")
    try:
        return run(engine)
    finally:
        engine.worker.close()


@pytest.fixture
def engines(folder: Path) -> Iterator[Any]:
    """Make engines with drafters, and close them."""
    made: list[TokenEngine] = []

    def make(drafter: str, texts: Ran, tokens: int = 4, **settings: Any) -> TokenEngine:
        sizes = {"graph_buckets": (1, 2, 5), "graph_token_buckets": (64,)}
        engine = TokenEngine(folder, **{"speculative": "ngram", "draft_tokens": tokens, **sizes, **settings})
        made.append(engine)
        assert isinstance(engine.worker, SpeculativeWorker)
        if drafter != "ngram":
            whole = [prompt + output for prompt, output in zip(PROMPTS, texts.tokens, strict=True)]
            engine.worker.drafter = DRAFTERS[drafter](tokens, Texts(whole), VOCABULARY)
        return engine

    yield make
    for engine in made:
        engine.worker.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", *DRAFTERS])
def test_proposals_change_no_text(engines: Any, plain: Ran, drafter: str, graph: str, overlap: bool) -> None:
    engine = engines(drafter, plain, graph=graph, overlap=overlap)
    found = run(engine)
    check_same(found, plain)
    decoded = {path for path in engine.paths if path != "eager"}
    assert graph == "off" or decoded, engine.paths


@pytest.mark.needs("device")
@pytest.mark.parametrize("tokens", [1, 3, 6])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_neither_pages_nor_the_number_of_proposals_change_a_text(
    engines: Any, plain: Ran, tokens: int, page_size: int
) -> None:
    settings = {"graph": "off", "page_size": page_size, "max_batch_tokens": 16, "poison": True}
    check_same(run(engines("guessing", plain, tokens, **settings)), plain)


@pytest.mark.needs("device")
def test_who_is_always_right_saves_steps_and_who_never_is_saves_none(engines: Any, plain: Ran) -> None:
    decodes = {name: run(engines(name, plain, 3, graph="off", overlap=False)).decodes for name in DRAFTERS}
    # A prefill step draws the first token; then each step draws four, and the fifth request stops
    # earlier.
    assert decodes["oracle"] == 1 + -(-(TOKENS - 1) // 4)
    assert decodes["adversary"] == TOKENS
    assert decodes["oracle"] < decodes["guessing"] < decodes["adversary"]


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cache_that_holds_no_two_texts_changes_none(engines: Any, plain: Ran, overlap: bool) -> None:
    engine = engines("guessing", plain, graph="off", overlap=overlap, kv_cache_memory=40 << 10, max_model_len=80)
    assert engine.worker.limits.capacity < sum(map(len, PROMPTS)) + 5 * TOKENS
    check_same(run(engine), plain)
    assert engine.scheduler.stats().retractions > 0


@pytest.mark.needs("device")
def test_a_text_that_comes_again_is_found_in_the_cache_and_the_same(engines: Any, plain: Ran) -> None:
    engine = engines("guessing", plain, graph="off")
    for _ in range(2):
        check_same(run(engine), plain)
    assert engine.scheduler.stats().hit_tokens > 0
