"""Tests of grammar masks on this device: batches of constrained and free requests under different
schedules, and real grammars without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from devices.mlx.tests.parity import CONTEXT, TokenEngine, check_same, write_tiny
from sglcore.conformance.inputs.hashed_grammar import follows
from sglcore.conformance.inputs.prompts import VOCAB, random_prompts
from sglcore.conformance.law import LawBroken
from sglcore.conformance.session import Result
from sglcore.sampling.grammar_spec import Grammar
from sglcore.sampling.state import Masks
from sglcore_mlx import sample_step
from tests.engine.constrained import Constrained, Sample

LENGTHS = (1, 5, 30, 17, 9, 22)
GRAMMARS = (11, None, 12, 13, None, 14)
TOKENS = 14
DRAWN = {"temperature": 1.0, "seed": 5}
PAGES = CONTEXT // 4 + 1
"""So few pages that a request is retracted."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("grammar") / "tiny")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[TokenEngine]:
    with TokenEngine(checkpoint) as started:
        yield started


def run(engine: TokenEngine, **how: object) -> list[Result]:
    """Run the test's requests."""
    return engine.session(**how).run(random_prompts(31, LENGTHS, VOCAB), TOKENS, grammars=GRAMMARS, **DRAWN)


def alone(engine: TokenEngine) -> list[list[int]]:
    """Return each request's tokens when it runs alone."""
    prompts = zip(random_prompts(31, LENGTHS, VOCAB), GRAMMARS, strict=True)
    return [engine.session().run([prompt], TOKENS, grammars=[seed], **DRAWN)[0].tokens for prompt, seed in prompts]


def differ(engine: TokenEngine, wanted: list[list[int]]) -> bool:
    """Return whether a schedule changes a token or allows one that the grammar forbids."""
    for how in ({}, {"overlap": False, "stagger": 2}, {"chunk": 12, "pages": PAGES, "stagger": 1}):
        try:
            found = [result.tokens for result in run(engine, **how)]
        except LawBroken:  # A token that the grammar forbids ends its request with an error.
            return True
        kept = [seed is None or follows(seed, VOCAB, tokens) for seed, tokens in zip(GRAMMARS, found, strict=True)]
        if found != wanted or not all(kept):
            return True
    return False


def test_nobody_notices_who_is_beside_him_whatever_the_schedule(engine: TokenEngine) -> None:
    assert not differ(engine, alone(engine))


def test_prefix_hits_change_nothing(engine: TokenEngine) -> None:
    session = engine.session(chunk=12, pages=PAGES + 8)
    prompts = random_prompts(31, LENGTHS, VOCAB)
    first, again = (session.run(prompts, TOKENS, grammars=GRAMMARS, **DRAWN) for _ in range(2))
    assert [result.tokens for result in first] == [result.tokens for result in again] == alone(engine)
    assert session.scheduler.stats().hit_tokens > 0 and session.scheduler.stats().retractions > 0


DEFECTS = {
    "masks of the step before": lambda real, kept: lambda arrived: _before(kept, real(arrived)),
    "masks on the row beside": lambda real, kept: lambda arrived: _beside(real(arrived)),
    "no masks": lambda real, kept: lambda arrived: None,
}


def _before(kept: list, made: Masks | None) -> Masks | None:
    kept.append(made)
    old = kept[-2] if len(kept) > 1 else None
    return old if made is not None and old is not None and old.words.shape == made.words.shape else made


def _beside(made: Masks | None) -> Masks | None:
    return None if made is None else Masks(mx.array(np.roll(np.array(made.rows), 1)), made.words)


@pytest.mark.parametrize("name", list(DEFECTS))
def test_the_law_catches(name: str, engine: TokenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = alone(engine)
    monkeypatch.setattr(sample_step, "_masks", DEFECTS[name](sample_step._masks, []))
    assert differ(engine, wanted)


@pytest.mark.needs("torch")
def test_the_tokens_are_those_of_the_processors_device(checkpoint: Path, engine: TokenEngine) -> None:
    with TokenEngine(checkpoint, "cpu", kv_cache_memory=8 << 20) as host:
        check_same(run(engine), run(host), 1e-3)
        check_same(run(engine, chunk=12, stagger=1), run(host, chunk=12, stagger=1), 1e-3)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_the_embedded_model_writes_json_text_and_terms_beside_free_text() -> None:
    kinds = [Grammar("json_schema", json.dumps(SCHEMA)), Grammar("regex", "[a-z]{3,6}"), None]
    kinds.append(Grammar("lark", 'start: "<" NUMBER ">"\nNUMBER: /[0-9]{1,4}/'))
    samples = [Sample(grammar, seed, 80) for grammar in kinds for seed in range(3)]
    with Constrained(device="mlx", dtype="float32", max_requests=12) as model:
        answers = model.run(samples)
        free = [sample for sample in samples if sample.grammar is None]
        assert model.run(free) == answers[6:9]
    assert all(answer.finish == "stop" for answer in (*answers[:6], *answers[9:]))
    for answer in answers[:3]:
        value = json.loads(answer.text)
        assert set(value) == {"name", "age"} and len(value["name"]) <= 8 and 3 <= value["age"] <= 99
    assert all(re.fullmatch("[a-z]{3,6}", answer.text) for answer in answers[3:6])
    assert all(re.fullmatch("<[0-9]{1,4}>", answer.text) for answer in answers[9:])
