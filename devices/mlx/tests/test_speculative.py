"""Tests that speculation does not change output: with any drafter, sampled or greedy, compiled or
not, with or without overlap, tokens and log-probabilities equal those of plain decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from devices.mlx.tests.parity import SPOILED, TokenEngine, write_tiny
from devices.mlx.tests.speculating import (
    DRAFTERS,
    PROMPTS,
    SAMPLING,
    TOKENS,
    AtRandom,
    Ran,
    check_same,
    plant,
    run,
    stepper_of,
)
from sglcore.conformance.inputs.hashed_grammar import HashedMatcher, follows
from sglcore.conformance.inputs.prompts import VOCAB, random_prompts
from sglcore.schedule.cache.prefix_proposals import PrefixProposals
from sglcore.schedule.request import Request
from sglcore_mlx.speculative.stepper import SpeculativeStepper
from sglcore_mlx.speculative.verify import Placed, place
from sglcore_mlx.speculative.worker import SpeculativeWorker

Engines = Callable[..., TokenEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("speculative") / "tiny")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[TokenEngine]:
    """An engine without speculation."""
    with TokenEngine(folder, max_requests=len(PROMPTS)) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(plain: TokenEngine) -> Ran:
    """The results without speculation."""
    found = run(plain)
    assert "stop" in found.reasons and found.proposed == 0
    return found


@pytest.fixture
def engines(folder: Path) -> Iterator[Engines]:
    """A function that makes engines with speculation; closes them at the end."""
    made: list[TokenEngine] = []

    def make(drafter: str, wanted: Ran, tokens: int | None = 4, kind: str = "ngram", **settings: Any) -> TokenEngine:
        given = {"speculative": kind, "draft_tokens": tokens, "poison": True, "max_requests": len(PROMPTS)}
        engine = TokenEngine(folder, **given, **settings)
        engine.recorder.keep = True
        made.append(engine)
        if drafter != "ngram":
            plant(engine, drafter, wanted)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("drafter", ["ngram", *DRAFTERS])
def test_proposals_change_no_text(engines: Engines, wanted: Ran, drafter: str, graph: str, overlap: bool) -> None:
    engine = engines(drafter, wanted, graph=graph)
    found = run(engine, overlap=overlap)
    check_same(found, wanted)
    assert found.proposed > 0
    paths = {result.path for _, result in engine.recorder.steps if result.proposed is not None}
    assert all(path.startswith("compiled") is (graph == "compiled") for path in paths)


@pytest.mark.parametrize("drafter", ["ngram", "guessing"])
def test_what_stands_where_nothing_is_proposed_reaches_no_text(tmp_path: Path, drafter: str) -> None:
    check_spoiled(tmp_path, drafter)


def test_a_token_that_is_no_number_in_that_place_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_zeros(self: SpeculativeStepper, *given: Any) -> Placed:
        made = place(self._state.last, self._drafts, *given)
        proposed = self._drafts.proposals[given[0]][:, : made.ids.shape[1] - 1]
        return Placed(mx.concatenate([made.ids[:, :1], mx.maximum(proposed, 0)], axis=1), made.positions, made.owners)

    monkeypatch.setattr(SpeculativeStepper, "_place", with_zeros)
    with pytest.raises(AssertionError):
        check_spoiled(tmp_path, "guessing")


def check_spoiled(folder: Path, drafter: str) -> None:
    """Assert that output is the same with NaN embeddings of tokens that are never sampled."""
    write_tiny(folder, spoiled=True)
    never = [{"temperature": 1.0, "seed": seed, "logit_bias": dict.fromkeys(SPOILED, -(2.0**30))} for seed in range(4)]
    given: dict[str, Any] = {"prompts": PROMPTS[:4], "samplings": never}
    with TokenEngine(folder) as engine:
        alone = run(engine, **given)
    with TokenEngine(folder, speculative="ngram", draft_tokens=4, poison=True) as engine:
        if drafter != "ngram":
            plant(engine, drafter, alone, PROMPTS[:4])
        check_same(run(engine, **given), alone)


@pytest.mark.parametrize("stagger", [1, 3])
def test_nobody_notices_who_joins_and_leaves(engines: Engines, wanted: Ran, stagger: int) -> None:
    check_same(run(engines("guessing", wanted, 3), stagger=stagger, chunk=12), wanted)


@pytest.mark.parametrize("tokens", [1, 3, 6])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_neither_pages_nor_the_number_of_proposals_change_a_text(
    engines: Engines, wanted: Ran, tokens: int, page_size: int
) -> None:
    check_same(run(engines("guessing", wanted, tokens, page_size=page_size), scramble=3), wanted)


def test_who_is_always_right_saves_steps_and_who_never_is_saves_none(engines: Engines, wanted: Ran) -> None:
    prompts = {"prompts": PROMPTS[:2], "samplings": SAMPLING[:2]}
    found = {name: run(engines(name, wanted, 3), overlap=False, **prompts) for name in DRAFTERS}
    # The prompts' step gives the first token; each later step gives up to four.
    assert found["oracle"].decodes == 1 + -(-(TOKENS - 1) // 4)
    assert found["adversary"].decodes == TOKENS and found["adversary"].accepted == 0
    assert found["oracle"].decodes < found["guessing"].decodes < found["adversary"].decodes


@pytest.mark.parametrize("tokens", [1, 4, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_texts_that_repeat_take_few_steps(tmp_path: Path, tokens: int, overlap: bool) -> None:
    folder, text = write_circle(tmp_path / "circle", 12)
    given: dict[str, Any] = {
        "prompts": [text, text[5:] + text[:5]],
        "samplings": [{"temperature": 0.0}] * 2,
        "tokens": 84,
    }
    with TokenEngine(folder) as engine:
        alone = run(engine, **given)
    assert alone.tokens[0] == text * 7
    with TokenEngine(folder, speculative="ngram", draft_tokens=tokens) as engine:
        found = run(engine, **given, overlap=overlap)
    check_same(found, alone)
    # In the first round the drafter knows no text.
    assert 84 / (found.decodes - 12) >= 0.7 * (tokens + 1), found


def write_circle(folder: Path, length: int) -> tuple[Path, list[int]]:
    """Write a checkpoint with greedy output that cycles through `length` tokens. Return the folder
    and the tokens in order."""
    write_tiny(folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        weight[...] = 0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1 if "norm" in name else weight
    table, text = weights["model.embed_tokens.weight"], list(range(5, 5 + length))
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    head = weights["lm_head.weight"]
    head[...] = 0
    head[text] = 4 * table[text[-1:] + text[:-1]]
    save_file(weights, folder / "model.safetensors")
    return folder, text


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cache_that_holds_no_two_texts_changes_none(engines: Engines, wanted: Ran, overlap: bool) -> None:
    found = run(engines("guessing", wanted), overlap=overlap, pages=34)
    check_same(found, wanted)
    assert found.retractions > 0


def test_a_text_that_comes_again_is_found_in_the_cache_and_the_same(engines: Engines, wanted: Ran) -> None:
    engine = engines("guessing", wanted)
    session = engine.session()
    check_same(run(engine, session=session), wanted)
    again = run(engine, session=session)
    check_same(again, wanted)
    assert again.hits > 0


@pytest.mark.parametrize("drafter", ["ngram", "guessing"])
@pytest.mark.parametrize("overlap", [False, True])
def test_lengths_that_change_at_random_change_no_text(
    engines: Engines, wanted: Ran, drafter: str, overlap: bool
) -> None:
    engine = engines(drafter, wanted)
    assert isinstance(engine.worker, SpeculativeWorker)
    engine.worker.length = AtRandom(4)
    check_same(run(engine, overlap=overlap), wanted)


def test_lengths_go_by_what_is_right_where_nobody_asks_for_one(engines: Engines, wanted: Ran) -> None:
    engine = engines("guessing", wanted, None)
    assert isinstance(engine.worker, SpeculativeWorker) and engine.worker.length.lengths == (0, 1, 3, 4)
    check_same(run(engine), wanted)
    verified = {int(result.proposed.max()) for _, result in engine.recorder.steps if result.proposed is not None}
    assert len(verified) > 1


GRAMMARS = (11, None, 12, 13, None, 14, 15)
"""The seed of each prompt's grammar; None: no grammar."""
CHANGING = (12, 14)
"""Seeds of the grammars that also add to logits."""


def constrain(requests: list[Request]) -> None:
    for request, seed in zip(requests, GRAMMARS, strict=True):
        request.matcher = matcher = None if seed is None else HashedMatcher(seed, VOCAB)
        request.change = matcher if seed in CHANGING else None


@pytest.mark.parametrize("drafter", ["ngram", *DRAFTERS])
@pytest.mark.parametrize("graph", ["off", "compiled"])
def test_a_grammar_and_proposals_change_no_text(
    engines: Engines, plain: TokenEngine, wanted: Ran, drafter: str, graph: str
) -> None:
    bound = run(plain, prepare=constrain)
    for seed, tokens, reason in zip(GRAMMARS, bound.tokens, bound.reasons, strict=True):
        assert seed is None or follows(seed, VOCAB, tokens[: len(tokens) - (reason == "stop")])
    engine = engines("ngram", wanted, 3, graph=graph)
    if drafter != "ngram":
        plant(engine, drafter, bound)
    check_same(run(engine, prepare=constrain), bound)


def test_samples_of_one_prompt_are_as_without_proposals(engines: Engines, plain: TokenEngine, wanted: Ran) -> None:
    def lead(requests: list[Request]) -> None:
        for index, request in enumerate(requests[1:], start=1):
            request.leader, request.sample_index, request.request_id = requests[0], index, requests[0].rid

    samples = [{"temperature": 1.2, "top_p": 0.95, "presence_penalty": 0.5, "seed": seed} for seed in range(5)]
    given: dict[str, Any] = {"prompts": [PROMPTS[1]] * 5, "samplings": samples, "prepare": lead}
    alone = run(plain, **given)
    check_same(run(engines("ngram", wanted), **given), alone)
    assert len(set(map(tuple, alone.tokens))) == len(samples)


def test_texts_that_come_again_are_proposed_from_the_prefix_cache(engines: Engines, wanted: Ran) -> None:
    engine = engines("ngram", wanted, kind="suffix")
    stepper_of(engine).drafter = lambda known, last, tokens: known[:, :1] * 0 - 1
    assert engine.worker.limits.takes_proposals and not engine.worker.limits.can_overlap
    session = engine.session()
    first, again = (run(engine, session=session) for _ in range(2))
    for found in (first, again):
        check_same(found, wanted)
    assert first.proposed < again.proposed and first.accepted < again.accepted
    assert again.decodes < first.decodes


def test_whatever_the_host_proposes_no_text_changes(
    engines: Engines, wanted: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    monkeypatch.setattr(PrefixProposals, "following", lambda self, request: random.integers(0, VOCAB, 4).tolist())
    check_same(run(engines("ngram", wanted, kind="suffix")), wanted)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_what_is_proposed_and_right_is_what_it_is_on_the_processors_device(
    engines: Engines, folder: Path, wanted: Ran, kind: str
) -> None:
    settings = {"speculative": kind, "draft_tokens": 4, "max_requests": len(PROMPTS), "kv_cache_memory": 8 << 20}
    with TokenEngine(folder, "cpu", **settings) as host:
        sessions = host.session(overlap=False), engines("ngram", wanted, kind=kind).session(overlap=False)
        for _ in range(2):
            theirs, mine = (run(host, session=session) for session in sessions)
            assert mine.tokens == theirs.tokens
            assert (mine.decodes, mine.proposed, mine.accepted) == (theirs.decodes, theirs.proposed, theirs.accepted)
    assert 0 < mine.accepted < mine.proposed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_model_writes_what_it_writes_without(dtype: str) -> None:
    """Greedy and sampled requests in one batch."""
    from sglcore.engine.start import embedded_model

    prompts = random_prompts(5, (9, 30, 17, 4), 900)
    samplings = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.8, "seed": 2, "top_p": 0.9}]
    given: dict[str, Any] = {"prompts": prompts, "samplings": [*samplings, samplings[0]], "tokens": 40}
    settings = {"dtype": dtype, "page_size": 16, "kv_cache_memory": 8 << 20}
    with TokenEngine(embedded_model(), **settings) as engine:
        alone = run(engine, **given)
    with TokenEngine(embedded_model(), **settings, speculative="ngram", draft_tokens=4) as engine:
        found = run(engine, **given)
    check_same(found, alone)
    assert 0 < found.accepted < found.proposed


def test_all_samplings_are_tried() -> None:
    assert len(SAMPLING) == len(PROMPTS) == len(GRAMMARS)
