"""Rejection in whole engines: what is greedy is as without proposals, what is certain is accepted, and a text depends on nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from sglcore.conformance.matcher import HashedMatcher, follows
from sglcore.device.errors import ConfigError
from sglcore.runtime.speculative.rejection import RULES, RejectionWorker
from sglcore.schedule.request import Request
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine
from tests.laws.test_speculative_laws import PROMPTS, TOKENS, VOCABULARY, check_same, folder, run

__all__ = ["folder"]

GREEDY = [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.4}, *[{"temperature": 0.0}] * 3]
DRAWN = [{"temperature": 1.0, "seed": seed, "top_p": 0.95, "top_k": 60} for seed in range(5)]


@pytest.fixture
def engines(folder: Path) -> Iterator[Callable[..., TokenEngine]]:
    """Makes engines, and closes them."""
    made: list[TokenEngine] = []

    def make(**settings: Any) -> TokenEngine:
        made.append(TokenEngine(folder, **{"graph": "off", **settings}))
        return made[-1]

    yield make
    for engine in made:
        engine.worker.close()


@pytest.fixture(scope="module")
def twin(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft that is the same model, and so has the same law."""
    return str(copytree(folder, tmp_path_factory.mktemp("twin") / "draft"))


def proposing(engines: Callable[..., TokenEngine], rule: str, **settings: Any) -> TokenEngine:
    """Proposes by a model, unless said."""
    given = {"speculative": "standalone", "draft_tokens": 3, "speculative_verify": rule, "poison": True}
    return engines(**{**given, **settings})


@pytest.mark.needs("device")
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("drafter", ["model", "ngram", *DRAFTERS])
def test_what_is_greedy_is_as_without_proposals(
    engines: Callable[..., TokenEngine], twin: str, rule: str, drafter: str
) -> None:
    wanted = run(engines(), samplings=GREEDY)
    kind = {"draft_model": twin, "speculative": "standalone"} if drafter == "model" else {"speculative": "ngram"}
    engine = proposing(engines, rule, overlap=False, **kind)
    assert isinstance(engine.worker, RejectionWorker)
    if drafter in DRAFTERS:
        texts = Texts([prompt + output for prompt, output in zip(PROMPTS, wanted.tokens, strict=True)])
        engine.worker.drafter = DRAFTERS[drafter](3, texts, VOCABULARY)
    found = run(engine, samplings=GREEDY)
    check_same(found, wanted)
    assert drafter != "oracle" or found.decodes == 1 + -(-(TOKENS - 1) // 4)


@pytest.mark.parametrize("rule", list(RULES))
def test_a_draft_of_the_targets_law_is_accepted_and_nobody_notices_who_is_beside_him(
    engines: Callable[..., TokenEngine], twin: str, rule: str, graph: str
) -> None:
    engine = proposing(engines, rule, draft_model=twin, graph=graph, overlap=True)
    together = run(engine, samplings=DRAWN)
    # Where proposals are drawn with the target's noise, those of the same law are all right.
    coupled = run(proposing(engines, "coupled", draft_model=twin, graph=graph, overlap=True), samplings=DRAWN)
    assert together.decodes == coupled.decodes < TOKENS / 2 and together.tokens != coupled.tokens
    for place in (1, 3):
        alone = run(engine, PROMPTS[place : place + 1], samplings=DRAWN[place : place + 1])
        assert alone.tokens == together.tokens[place : place + 1]


@pytest.mark.needs("device")
@pytest.mark.parametrize("rule", list(RULES))
def test_what_is_drawn_under_a_grammar_keeps_to_it(engines: Callable[..., TokenEngine], twin: str, rule: str) -> None:
    def constrain(requests: list[Request]) -> None:
        for seed, request in enumerate(requests):
            request.matcher = HashedMatcher(seed, VOCABULARY)

    engine = proposing(engines, rule, draft_model=twin)
    found = run(engine, samplings=DRAWN, prepare=constrain)
    assert all(follows(seed, VOCABULARY, tokens) for seed, tokens in enumerate(found.tokens))
    assert found.decodes < TOKENS and found.reasons == ["length"] * len(PROMPTS)


@pytest.mark.needs("device")
def test_a_rule_that_there_is_not_is_refused_by_name(engines: Callable[..., TokenEngine]) -> None:
    with pytest.raises(ConfigError, match="'lossy'; wanted one of coupled, rejection, block"):
        engines(speculative="ngram", speculative_verify="lossy")
