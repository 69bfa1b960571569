"""Rejection sampling in whole engines: greedy text is unchanged, certain draft tokens are accepted,
and a text does not depend on other requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from sglcore.config.engine_config import EngineConfig
from sglcore.conformance.inputs.hashed_grammar import HashedMatcher, follows
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import DecisionLedger
from sglcore.runtime.speculative.chain_drafts import StandaloneDrafter
from sglcore.runtime.speculative.drafter import NONE, DraftRows
from sglcore.runtime.speculative.rejection import RULES, Rejection, RejectionWorker
from sglcore.runtime.speculative.speculation_bring_up import less_draft_probs
from sglcore.runtime.speculative.speculation_choice import Speculation
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.request import Request
from sglcore.step.sizing import MemoryBudget, size_text
from tests.checkpoints import llama, save
from tests.drafts import randomized
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine
from tests.laws.speculation.test_speculative_laws import CONTEXT, PROMPTS, VOCABULARY, folder, run
from tests.laws.speculation.texts import TOKENS, Ran, check_same

__all__ = ["folder"]

GREEDY = [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.4}, *[{"temperature": 0.0}] * 3]
DRAWN = [{"temperature": 1.0, "seed": seed, "top_p": 0.95, "top_k": 60} for seed in range(5)]


@pytest.fixture
def engines(folder: Path) -> Iterator[Callable[..., TokenEngine]]:
    """Make engines, and close them."""
    made: list[TokenEngine] = []

    def make(**settings: Any) -> TokenEngine:
        made.append(TokenEngine(folder, **{"graph": "off", **settings}))
        return made[-1]

    yield make
    for engine in made:
        engine.worker.close()


@pytest.fixture(scope="module")
def twin(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft that is the same model, so it has the same distribution."""
    return str(copytree(folder, tmp_path_factory.mktemp("twin") / "draft"))


def proposing(engines: Callable[..., TokenEngine], rule: str, **settings: Any) -> TokenEngine:
    """Make an engine with a draft model, unless `settings` name another drafter."""
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
    # With `coupled`, draft tokens are drawn with the target's noise: from the same distribution all
    # are accepted.
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
def test_cells_of_a_draft_are_paid_for(engines: Callable[..., TokenEngine], twin: str) -> None:
    given = {"kv_cache_memory": 96 << 10, "max_model_len": 64}
    alone, beside = engines(**given), engines(speculative="standalone", draft_model=twin, **given)
    assert beside.worker.limits.num_pages == alone.worker.limits.num_pages // 2
    assert beside.worker.limits.kv_bytes <= 96 << 10


@pytest.mark.needs("device")
def test_a_rule_that_there_is_not_is_refused_by_name(engines: Callable[..., TokenEngine]) -> None:
    with pytest.raises(ConfigError, match="'lossy'; wanted one of coupled, rejection, block"):
        engines(speculative="ngram", speculative_verify="lossy")


MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 21},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    # Sampling from a single candidate is as certain as greedy, but takes the path of sampled
    # requests.
    {"temperature": 1.0, "seed": 22, "top_p": 0.001, "repetition_penalty": 1.4, "logit_bias": {30: 3.0}},
    {"temperature": 0.8, "seed": 23, "top_p": 0.9, "logit_bias": {30: 4.0}, "min_tokens": 9, "stop_token_ids": [5]},
]
CERTAIN = (0, 2, 3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft with another distribution."""
    oracle = randomized(llama(max_position_embeddings=CONTEXT, vocab_size=VOCABULARY, num_hidden_layers=1), seed=9)
    return str(save(oracle, tmp_path_factory.mktemp("other")))


def check_certain(found: Ran, wanted: Ran) -> None:
    """Rows without a random choice equal those without draft tokens."""
    for place in CERTAIN:
        assert found.tokens[place] == wanted.tokens[place]
        np.testing.assert_allclose(found.logprobs[place], wanted.logprobs[place], atol=2e-4, rtol=0)


@pytest.mark.needs("device")
@pytest.mark.parametrize("rule", list(RULES))
def test_rows_of_a_batch_keep_their_own_parameters(engines: Callable[..., TokenEngine], other: str, rule: str) -> None:
    wanted = run(engines(), samplings=MIXED)
    engine = proposing(engines, rule, draft_model=other)
    found, again = (run(engine, samplings=MIXED) for _ in range(2))
    assert found.tokens == again.tokens
    check_certain(found, wanted)
    assert run(engine, PROMPTS[4:], samplings=MIXED[4:]).tokens == found.tokens[4:]
    (seeded,) = run(engine, PROMPTS[4:], samplings=[{**MIXED[4], "seed": 99}]).tokens
    assert seeded != found.tokens[4] != wanted.tokens[4]
    counted = sums_of(engine.scheduler.drafts)
    assert 0 < counted.accepted < counted.proposed


class ForgetsPenalties(RejectionWorker):
    def _decide(self, staged: Any, rows: Any, logits: Any, state: Any) -> Any:
        return super()._decide(staged, rows, logits, replace(state, penalties=None))


class ParametersOfTheNextRow(RejectionWorker):
    def _decide(self, *given: Any) -> Any:
        self.rule.__class__ = NextRow
        return super()._decide(*given)


class NextRow(Rejection):
    def verify(self, logits: Any, state: Any, chain: Any) -> Any:
        return super().verify(logits, replace(state, greedy=state.greedy.roll(1), top_p=state.top_p.roll(1)), chain)


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", [ForgetsPenalties, ParametersOfTheNextRow], ids=lambda each: each.__name__)
def test_a_defect_of_parameters_changes_what_is_certain(
    engines: Callable[..., TokenEngine], other: str, defect: type[RejectionWorker]
) -> None:
    engine = proposing(engines, "rejection", draft_model=other)
    engine.worker.__class__ = defect
    with pytest.raises(AssertionError):
        check_certain(run(engine, samplings=MIXED), run(engines(), samplings=MIXED))


class FirstRowFails(RejectionWorker):
    def _decide(self, staged: Any, rows: Any, logits: Any, state: Any) -> Any:
        logits = logits.clone()
        logits[: len(logits) // len(rows.slots)] = float("nan")
        return super()._decide(staged, rows, logits, state)


@pytest.mark.needs("device")
@pytest.mark.parametrize("rule", list(RULES))
def test_a_row_that_is_not_finite_ends_alone(engines: Callable[..., TokenEngine], other: str, rule: str) -> None:
    requests, wanted = list[Request](), run(engines(), samplings=GREEDY).tokens
    engine = proposing(engines, rule, draft_model=other)
    engine.worker.__class__ = FirstRowFails
    with pytest.raises(AssertionError, match="were not finite"):
        run(engine, PROMPTS[:1] * 2, samplings=GREEDY[:1] * 2, prepare=requests.extend)
    assert [request.finish_reason for request in requests] == ["error", "error"]
    assert [list(request.output_ids) for request in requests][1] == wanted[0][: len(requests[1].output_ids)]


class NotFinite(StandaloneDrafter):
    def run(self, batch: Any) -> Any:
        return super().run(batch) * float("nan")


@pytest.mark.needs("device")
@pytest.mark.parametrize("rule", list(RULES))
def test_what_a_draft_that_is_not_finite_says_is_no_proposal(
    engines: Callable[..., TokenEngine], other: str, rule: str
) -> None:
    engine = proposing(engines, rule, draft_model=other)
    assert isinstance(engine.worker, RejectionWorker)
    engine.worker.drafter.__class__ = NotFinite
    assert run(engine, samplings=DRAWN).decodes >= TOKENS
    assert sums_of(engine.scheduler.drafts)[1:] == (0, 0)


@pytest.mark.needs("device")
def test_what_proposals_are_drawn_from_is_kept_free(engines: Callable[..., TokenEngine], other: str) -> None:
    engine = proposing(engines, "block", draft_model=other)
    assert isinstance(engine.worker, RejectionWorker) and engine.worker._draft_probs is not None
    config = EngineConfig(max_requests=6, draft_tokens=3, speculative_verify="block")
    ledger, model = DecisionLedger(), cast(Any, SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY)))
    taken = engine.worker._draft_probs.nbytes
    assert taken == 7 * 3 * VOCABULARY * 4
    budget = MemoryBudget(1 << 30, taken + 5, "told")
    speculation = Speculation("standalone", (3,), model, rule="block")
    assert less_draft_probs(config, model, speculation, budget, ledger).available == 5
    assert [(row.topic, row.effective) for row in ledger.rows] == [("draft probabilities", size_text(taken))]
    with pytest.raises(
        ConfigError, match="distributions of draft tokens take .* are available; lower max_requests or draft_tokens"
    ):
        less_draft_probs(config, model, speculation, replace(budget, available=taken - 1), ledger)
    for other_way in (replace(speculation, rule="coupled"), replace(speculation, draft=None)):
        assert less_draft_probs(config, model, other_way, budget, ledger) == budget


def kept(engine: TokenEngine) -> tuple[Any, list[int]]:
    """Return the result of a run: the verified and accepted draft tokens of each step, and the KV
    slots in use by request slot."""
    worker = engine.worker
    assert isinstance(worker, SpeculativeWorker)
    return engine.scheduler.drafts, worker._lengths.tolist()


def compared(engines: Callable[..., TokenEngine], rule: str, defect: type[RejectionWorker] | None = None) -> bool:
    """Whether greedy texts leave the same counts and lengths as with `coupled`: both rules accept
    the same draft tokens. A row runs past its end only if steps overlap."""
    texts = Texts(
        [prompt + output for prompt, output in zip(PROMPTS, run(engines(), samplings=GREEDY).tokens, strict=True)]
    )
    left = list[Any]()
    for each in ("coupled", rule):
        engine = proposing(engines, each, speculative="ngram", overlap=True)
        assert isinstance(engine.worker, SpeculativeWorker)
        engine.worker.drafter = DRAFTERS["guessing"](3, texts, VOCABULARY)
        if defect is KnowsNoEnd and not engine.worker.limits.can_overlap:
            pytest.skip("needs steps that overlap")
        if each == rule and defect is not None:
            engine.worker.__class__ = defect
        run(engine, samplings=GREEDY)
        left.append(kept(engine))
    return left[0] == left[1]


class CountsOneMore(RejectionWorker):
    def _decide(self, *given: Any) -> Any:
        sampled, runs = super()._decide(*given)
        runs[1] += 1
        return sampled, runs


class KnowsNoEnd(RejectionWorker):
    def _decide(self, staged: Any, rows: Any, logits: Any, state: Any) -> Any:
        return super()._decide(staged, replace(rows, limits=rows.limits + 64), logits, state)


class TakesWhatHasNoCell(RejectionWorker):
    def _decide(self, staged: Any, *given: Any) -> Any:
        return super()._decide(replace(staged, req_pool_indices=staged.req_pool_indices.clamp(min=1)), *given)


@pytest.mark.needs("device")
@pytest.mark.parametrize("rule", list(RULES))
def test_what_is_greedy_counts_and_ends_as_by_the_rule_that_changes_no_text(
    engines: Callable[..., TokenEngine], rule: str
) -> None:
    assert compared(engines, rule)


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", [CountsOneMore, KnowsNoEnd, TakesWhatHasNoCell], ids=lambda each: each.__name__)
def test_a_defect_of_what_is_counted_shows(engines: Callable[..., TokenEngine], defect: type[RejectionWorker]) -> None:
    assert not compared(engines, "rejection", defect)


class LooksAtEnds(RejectionWorker):
    """Checks that nothing is drafted without a KV slot; `ends` counts such positions."""

    ends = 0

    def _propose(self, rows: DraftRows) -> None:
        self.propose(rows)
        proposals = self._proposals.index_select(0, rows.slots)
        steps = torch.arange(proposals.shape[1], dtype=torch.int32, device=proposals.device)
        without = rows.lengths[:, None] + steps >= rows.limits[:, None]
        assert (proposals[without] == NONE).all(), "proposed without a cell"
        self.ends += int(without.sum())

    def propose(self, rows: DraftRows) -> None:
        """Draft as the base class does."""
        RejectionWorker._propose(self, rows)


class KeepsWhatHadNoCell(LooksAtEnds):
    def propose(self, rows: DraftRows) -> None:
        SpeculativeWorker._propose(self, rows)


@pytest.mark.needs("device")
@pytest.mark.parametrize("kind", [LooksAtEnds, KeepsWhatHadNoCell])
def test_what_a_draft_had_no_cell_for_is_not_proposed(
    engines: Callable[..., TokenEngine], other: str, kind: type[LooksAtEnds]
) -> None:
    engine = proposing(engines, "rejection", draft_model=other)
    engine.worker.__class__ = kind
    assert isinstance(engine.worker, LooksAtEnds)
    if kind is LooksAtEnds:
        run(engine, samplings=DRAWN)
        assert engine.worker.ends
        return
    with pytest.raises(AssertionError, match="proposed without a cell"):
        run(engine, samplings=DRAWN)
