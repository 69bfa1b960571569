"""Recurrent models verify draft tokens: with any drafter, sampled or greedy, tokens and
log-probabilities equal plain decode, and the state is that of the accepted tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglcore.core.errors import ConfigError
from sglcore.runtime.memory.states import Runs, StatePool
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.schedule.running_requests import RunningRequests
from tests.checkpoints import granite_hybrid, lfm2, nemotron_h, qwen3_next, save
from tests.drafts import next_token
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.speculation.test_draft_laws import run as run_drafts
from tests.laws.speculation.test_speculative_laws import PROMPTS, run
from tests.laws.speculation.texts import Ran, check_same

CONTEXT, VOCABULARY = 128, 97
FAMILIES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"gated delta rule": qwen3_next, "short convolutions": lfm2, "mamba 2": granite_hybrid, "no MLP": nemotron_h}
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Ran]]:
    """A checkpoint of each recurrence, and its texts without draft tokens."""
    oracle = FAMILIES[request.param](max_position_embeddings=CONTEXT)
    folder = save(oracle, tmp_path_factory.mktemp("states"))
    engine = TokenEngine(folder, graph="off")
    yield folder, run(engine)
    engine.worker.close()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """One of these models, for tests that do not depend on the recurrence."""
    folder = save(qwen3_next(max_position_embeddings=CONTEXT), tmp_path_factory.mktemp("hybrid"))
    engine = TokenEngine(folder, graph="off")
    found = run(engine)
    engine.worker.close()
    return folder, found


def proposing(folder: Path, drafter: str, plain: Ran, tokens: int = 4, **settings: Any) -> TokenEngine:
    """Make an engine with a drafter."""
    sizes = {"graph_buckets": (1, 2, 5), "graph_token_buckets": (64,), "poison": True}
    engine = TokenEngine(folder, **{"speculative": "ngram", "draft_tokens": tokens, **sizes, **settings})
    assert isinstance(engine.worker, SpeculativeWorker)
    if drafter != "ngram":
        whole = [prompt + output for prompt, output in zip(PROMPTS, plain.tokens, strict=True)]
        engine.worker.drafter = DRAFTERS[drafter](tokens, Texts(whole), VOCABULARY)
    return engine


def check(folder: Path, drafter: str, plain: Ran, tokens: int = 4, **settings: Any) -> TokenEngine:
    """Check that the texts are the same; returns the closed engine."""
    engine = proposing(folder, drafter, plain, tokens, **settings)
    try:
        check_same(run(engine), plain)
    finally:
        engine.worker.close()
    return engine


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_proposals_change_no_text_of_a_model_with_states(family: tuple[Path, Ran], overlap: bool) -> None:
    check(family[0], "guessing", family[1], graph="off", overlap=overlap)


def test_neither_do_they_in_any_graph(hybrid: tuple[Path, Ran], graph: str) -> None:
    engine = check(hybrid[0], "guessing", hybrid[1], graph=graph)
    assert graph == "off" or engine.paths != {"eager"}


@pytest.mark.needs("device")
@pytest.mark.parametrize("drafter", ["ngram", "oracle", "adversary"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_neither_who_proposes_nor_how_many_changes_a_text(hybrid: tuple[Path, Ran], drafter: str, tokens: int) -> None:
    check(*hybrid[:1], drafter, hybrid[1], tokens, graph="off", max_batch_tokens=16, page_size=16)


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_cache_that_holds_no_two_texts_changes_none_with_states(hybrid: tuple[Path, Ran], overlap: bool) -> None:
    folder, plain = hybrid
    small = {"kv_cache_memory": 36 << 10, "max_model_len": 80, "snapshot_memory": 16 << 10}
    engine = check(folder, "guessing", plain, graph="off", overlap=overlap, **small)
    assert engine.scheduler.stats().retractions > 0


@pytest.mark.needs("device")
def test_texts_that_come_again_begin_with_snapshots_of_prompts(hybrid: tuple[Path, Ran]) -> None:
    folder, plain = hybrid
    engine = proposing(folder, "guessing", plain, graph="off")
    for _ in range(2):
        check_same(run(engine), plain)
    assert engine.scheduler.stats().snapshot_hits > 0
    engine.worker.close()


def test_a_replay_beside_an_eager_forward_goes_on_from_the_same_copies(hybrid: tuple[Path, Ran], graph: str) -> None:
    if graph == "off":
        return
    engine = proposing(hybrid[0], "guessing", hybrid[1], graph=graph, shadow=1)
    check_same(run(engine), hybrid[1])
    graphs = engine.worker.runner.graphs
    assert graphs is not None and graphs.shadow is not None and graphs.shadow.compared > 5
    engine.worker.close()


@pytest.mark.needs("device")
def test_verifications_in_two_halves_keep_each_request_s_rows(hybrid: tuple[Path, Ran]) -> None:
    engine = check(hybrid[0], "guessing", hybrid[1], graph="off", two_batch_overlap="on")
    assert "eager:halves" in engine.paths


@pytest.mark.needs("device")
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_states_follow_what_other_rules_accept(hybrid: tuple[Path, Ran], rule: str) -> None:
    """Greedy texts are the same with these rules too."""
    greedy = [{"temperature": 0.0}] * len(PROMPTS)
    plain = TokenEngine(hybrid[0], graph="off")
    engine = TokenEngine(hybrid[0], graph="off", speculative="ngram", draft_tokens=3, speculative_verify=rule)
    check_same(run(engine, samplings=greedy), run(plain, samplings=greedy))
    for each in (engine, plain):
        each.worker.close()


@pytest.mark.needs("device")
def test_the_layer_behind_a_model_with_states_proposes_as_dense_torch_does(tmp_path: Path) -> None:
    target = qwen3_next(max_position_embeddings=CONTEXT)
    one = {"layer_types": ["full_attention"], "mlp_only_layers": []}
    dense = next_token(target, tmp_path, qwen3_next, "qwen", **one)
    assert run_drafts(tmp_path, "mtp", dense, target, graph="off", poison=True) < 5e-4


def second_turns(folder: Path, oracle: Any, prepare: Callable[[TokenEngine], None] = lambda engine: None) -> int:
    """Check the log-probabilities of texts, and of continuations from their end and from their
    middle; returns the number of snapshot hits."""
    engine = TokenEngine(folder, graph="off", speculative="ngram", draft_tokens=4, max_requests=3, page_size=4)
    prepare(engine)
    base = random_prompts(8, (9,))[0] * 3
    first = engine.run([base + tail for tail in random_prompts(10, (3, 5, 2, 4))], 24, stagger=2)
    check_logprobs(first, oracle)
    for cut in (None, 12):
        said = [each.prompt + each.tokens[:cut] for each in first]
        again = [text + tail for text, tail in zip(said, random_prompts(11, (3, 1, 2, 6)), strict=True)]
        check_logprobs(engine.run(again, 12, stagger=1), oracle)
    engine.worker.close()
    return engine.scheduler.stats().snapshot_hits


@pytest.mark.needs("device")
def test_log_probabilities_of_verified_tokens_and_of_second_turns_are_transformers_own(tmp_path: Path) -> None:
    oracle = qwen3_next(max_position_embeddings=CONTEXT)
    assert second_turns(save(oracle, tmp_path), oracle) > 3


@pytest.mark.needs("device")
def test_snapshots_by_steps_whose_end_only_the_device_knows_show(tmp_path: Path) -> None:
    """Mutant: saves a snapshot for a row that may have filled its last page, although the number of
    its accepted tokens is not known."""
    oracle = qwen3_next(max_position_embeddings=CONTEXT)

    def prepare(engine: TokenEngine) -> None:
        running = engine.scheduler.running
        limits = replace(running._limits, draft_tokens=0)

        class Saving(RunningRequests):
            def save_states(self, chosen: Any) -> Any:
                known, self._limits = self._limits, limits
                found = super().save_states(chosen)
                self._limits = known
                return found

        running.__class__ = Saving

    with pytest.raises(AssertionError):
        second_turns(save(oracle, tmp_path), oracle, prepare)


@pytest.mark.needs("device")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"speculative": "ngram", "model_impl": "transformers"}, "in transformers' classes, which cannot undo"),
        ({"speculative": "mtp", "draft_width": 2}, "keeps a state of each request, which can follow only one branch"),
    ],
)
def test_what_states_do_not_go_with_is_refused(settings: dict[str, Any], reason: str, hybrid: tuple[Path, Ran]) -> None:
    with pytest.raises(ConfigError, match=reason):
        TokenEngine(hybrid[0], graph="off", **settings)


class GoesOnAtOnce(StatePool):
    """Mutant: updates states before acceptance is known."""

    def runs(self, slots: Tensor, width: int) -> Runs:
        runs = super().runs(slots, width)
        return runs._replace(targets=runs.slots)


class NothingTakenIn(StatePool):
    """Mutant: forgets accepted tokens."""

    def take_in(self, slots: Tensor, counts: Tensor, width: int) -> None:
        """Do nothing."""


class AllTakenIn(StatePool):
    """Mutant: updates states by all draft tokens."""

    def take_in(self, slots: Tensor, counts: Tensor, width: int) -> None:
        super().take_in(slots, (slots.view(-1, width) > 0).sum(1, dtype=torch.int32), width)


class OneTooFew(StatePool):
    """Mutant: updates states by one token too few."""

    def take_in(self, slots: Tensor, counts: Tensor, width: int) -> None:
        super().take_in(slots, counts - 1, width)


class OnlyFirst(StatePool):
    """Mutant: no row sees the rows before it."""

    def runs(self, slots: Tensor, width: int) -> Runs:
        runs = super().runs(slots, width)
        return runs._replace(lens=runs.lens.clamp(max=1))


class OfNeighbours(StatePool):
    """Mutant: stores rows in another row's place."""

    def keep(self, layer_id: int, taken: Tensor, rows: Tensor) -> None:
        super().keep(layer_id, taken.roll(1, 0), rows)


class OfOneLayer(StatePool):
    """Mutant: every layer uses the inputs of the first."""

    def keep(self, layer_id: int, taken: Tensor, rows: Tensor) -> None:
        super().keep(layer_id, taken, rows)
        if layer_id:
            self._taken[layer_id][rows] = self._taken[0][rows]


MUTANTS = (GoesOnAtOnce, NothingTakenIn, AllTakenIn, OneTooFew, OnlyFirst, OfNeighbours, OfOneLayer)


@pytest.mark.needs("device")
@pytest.mark.parametrize("defect", MUTANTS, ids=lambda each: each.__name__)
def test_states_that_are_not_those_of_the_right_tokens_show(hybrid: tuple[Path, Ran], defect: type[StatePool]) -> None:
    engine = proposing(hybrid[0], "guessing", hybrid[1], graph="off")
    assert engine.worker.runner.state_pool is not None
    engine.worker.runner.state_pool.__class__ = defect
    with pytest.raises(AssertionError):
        check_same(run(engine), hybrid[1])
