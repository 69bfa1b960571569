"""Proposals change no text of a model that keeps its last tokens in rings: with any drafter, in every kind of graph, planned ahead
or not, tokens and log-probabilities are those of plain decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglcore.runtime.attention.sparse import compressed
from sglcore.runtime.attention.sparse.tokens import RequestRows
from sglcore.runtime.forward_batch import ForwardBatch
from sglcore.runtime.memory import deepseek_v4 as deepseek_v4_rows
from sglcore.runtime.speculative.worker import SpeculativeWorker
from tests.checkpoints import save
from tests.deepseek_v4 import HEAVY, SPARSE, deepseek_v4, with_published_names
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.test_speculative_laws import SAMPLING, Ran, check_same, run

PROMPTS = random_prompts(3, (7, 23, 40, 5, 16), 128)
TOKENS = 44
"""As long as the shortest text crosses two windows, and blocks of both kinds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 4 and of 16 tokens, a window of 16, and a layer that predicts one token more."""
    return with_published_names(deepseek_v4(), tmp_path_factory.mktemp("deepseek-v4"))


def opened(folder: Path, **settings: Any) -> TokenEngine:
    """An engine whose unused rows are no numbers."""
    given = {"attention_backend": "compressed", "page_size": 16, "max_model_len": 96, "max_batch_tokens": 40}
    return TokenEngine(folder, **{**given, "graph_token_buckets": (40,), "poison": True, "graph": "off", **settings})


@pytest.fixture(scope="module")
def plain(folder: Path) -> Ran:
    """What comes without proposals."""
    engine = opened(folder)
    found = run(engine, PROMPTS, TOKENS)
    engine.worker.close()
    return found


@pytest.fixture
def verify(folder: Path, plain: Ran) -> Iterator[Callable[..., TokenEngine]]:
    """Runs the prompts with proposals, and compares."""
    made: list[TokenEngine] = []

    def check(drafter: str, tokens: int | None = 4, times: int = 1, **settings: Any) -> TokenEngine:
        sizes = {"graph_buckets": (1, 5)}
        kind = "ngram" if drafter in DRAFTERS else drafter
        engine = opened(folder, speculative=kind, draft_tokens=tokens, **{**sizes, **settings})
        made.append(engine)
        assert isinstance(engine.worker, SpeculativeWorker)
        if drafter in DRAFTERS:
            whole = [prompt + output for prompt, output in zip(PROMPTS, plain.tokens, strict=True)]
            engine.worker.drafter = DRAFTERS[drafter](tokens or 4, Texts(whole), 128)
        for _ in range(times):
            check_same(run(engine, PROMPTS, TOKENS), plain)
        return engine

    yield check
    for engine in made:
        engine.worker.close()


CASES = [("oracle", True), ("adversary", True), ("guessing", False), ("guessing", True), ("ngram", True), ("mtp", True)]


@pytest.mark.parametrize(("drafter", "overlap"), CASES)
def test_proposals_change_no_text(verify: Any, drafter: str, graph: str, overlap: bool) -> None:
    engine = verify(drafter, graph=graph, overlap=overlap)
    assert graph == "off" or {path for path in engine.paths if path != "eager"}, engine.paths


@pytest.mark.needs("device")
@pytest.mark.parametrize("tokens", [1, 3, 10])
def test_their_number_changes_none(verify: Any, tokens: int) -> None:
    engine = verify("guessing", tokens, page_size=32)
    rings = {kept.ring for layer in engine.worker.runner.attn_backend.token_to_kv_pool.layers for kept in layer.values()}
    assert rings == {0, *({1: (8, 16), 3: (16, 32), 10: (32, 32)}[tokens])}


@pytest.mark.needs("device")
def test_numbers_that_change_change_none(verify: Any) -> None:
    """None among them, of which the host knows only the most cells that there can be."""
    engine = verify("guessing", None, times=3, overlap=True)
    assert {0, 1, 3, 4} == set(engine.worker.length._of(4).seconds) | set(engine.worker.length._of(2).seconds)


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cache_that_holds_no_two_texts_changes_none(verify: Any, overlap: bool) -> None:
    engine = verify("guessing", overlap=overlap, kv_cache_memory=300 << 10)
    assert engine.worker.limits.capacity < sum(map(len, PROMPTS)) + 5 * TOKENS
    assert engine.scheduler.stats().retractions > 0


@pytest.mark.needs("device")
def test_texts_that_go_on_from_verified_pages_are_the_same(folder: Path, plain: Ran) -> None:
    """From the end of each page of texts that proposals made, beside those that made them again."""
    bases = [prompt + output for prompt, output in zip(PROMPTS, plain.tokens, strict=True)]
    prompts = [base[:end] + tail for base in bases for end in (32, 48) for tail in random_prompts(end, (2, 9), 128)]
    wanted = opened(folder)
    engine = opened(folder, speculative="ngram", draft_tokens=4)
    samplings = [{"temperature": 1.0, "seed": seed} for seed in range(len(prompts))]
    found = [run(engine, PROMPTS, TOKENS), run(engine, prompts, 12, samplings)]
    check_same(found[0], plain)
    assert engine.scheduler.stats().hit_tokens >= 32 * len(prompts)
    check_same(found[1], run(wanted, prompts, 12, samplings))


@pytest.mark.needs("device")
def test_published_ratios_change_none(tmp_path: Path) -> None:
    """Around the ends of blocks of 128 tokens."""
    folder = save(deepseek_v4(compress_rates={SPARSE: 4, HEAVY: 128}), tmp_path)
    prompts, given = random_prompts(5, (119, 125, 127, 128, 250)), {"page_size": 128, "max_model_len": 320}
    wanted = run(opened(folder, **given), prompts, 24)
    engine = opened(folder, speculative="ngram", draft_tokens=4, **given)
    whole = [prompt + output for prompt, output in zip(prompts, wanted.tokens, strict=True)]
    engine.worker.drafter = DRAFTERS["guessing"](4, Texts(whole), 128)
    check_same(run(engine, prompts, 24), wanted)


def rings_of(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as a block takes, and so many beyond those that stay of a step."""
    monkeypatch.setattr(deepseek_v4_rows, "ring_size", lambda ratio, span, drafts: span + drafts - 2 + beyond)


def one_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring lacks one entry."""
    rings_of(-1, monkeypatch)


def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is made of what was kept before the step, and of the token that ends it."""
    of = RequestRows.of
    monkeypatch.setattr(RequestRows, "of", lambda batch: of(replace(batch, width=None)))


def counted_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are those that the most tokens would end."""

    def most(batch: ForwardBatch, ratio: int) -> int:
        assert batch.seq_lens_cpu is not None
        begins = batch.seq_lens_cpu - (1 if batch.extend_seq_lens_cpu is None else batch.extend_seq_lens_cpu)
        return int((batch.seq_lens_cpu // ratio - begins // ratio).sum())

    monkeypatch.setattr(compressed, "_most_completed", most)


@pytest.mark.needs("device")
def test_a_ring_that_is_as_long_as_it_must_be_changes_none(verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rings_of(0, monkeypatch)
    for drafter in ("guessing", "adversary"):
        verify(drafter, page_size=None)


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", [one_short, row_by_row, counted_by_the_host], ids=lambda each: each.__name__)
def test_a_defect_is_caught(verify: Any, defect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        for drafter in ("guessing", "adversary"):
            verify(drafter, page_size=None, overlap=True)
