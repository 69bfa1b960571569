"""Recurrent states with draft tokens in steps of every kind: with masks, with changing numbers of
draft tokens, with request slots that are reused at once, and with the sampling acceptance rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglcore.runtime.memory.states import StatePool
from sglcore.runtime.speculative.verify_worker import SpeculativeWorker
from sglcore.schedule.draft_counts import sums_of
from sglcore.schedule.request import Request
from tests.checkpoints import qwen3_next, save
from tests.laws.drafters import DRAFTERS, Texts
from tests.laws.engine import TokenEngine, check_logprobs, random_prompts
from tests.laws.speculation import test_speculative_grammar as grammars
from tests.laws.speculation.test_speculative_laws import PROMPTS, run
from tests.laws.speculation.texts import SAMPLING, Ran, check_same
from tests.laws.states.test_state_verification import proposing
from tests.runtime.speculation.test_speculative_length import LENGTHS, AtRandom

CONTEXT, VOCABULARY = 128, 97


@pytest.fixture(scope="module")
def oracle() -> Any:
    return qwen3_next(max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with recurrent layers."""
    return save(oracle, tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Ran]:
    """The results without draft tokens."""
    engine = TokenEngine(folder, graph="off")
    yield run(engine)
    engine.worker.close()


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
def test_steady_decode_steps_write_the_snapshots_of_their_rows(folder: Path, oracle: Any, overlap: bool) -> None:
    """The second turns begin with states that only decode steps without any other array wrote."""
    engine = TokenEngine(folder, graph="off", overlap=overlap, poison=True)
    (first,) = engine.run(random_prompts(3, (5,)), 30)
    before = engine.scheduler.stats().hit_tokens
    said = (first.prompt + first.tokens)[:33]
    check_logprobs(engine.run([said], 6, score_prompts=False), oracle)
    assert engine.scheduler.stats().hit_tokens - before == 32
    engine.worker.close()


@pytest.mark.needs("device")
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", "oracle", "guessing"])
def test_states_follow_what_grammars_allow(folder: Path, drafter: str, changes: bool) -> None:
    """With masks a step waits for its draft tokens, and their number may change with each step."""
    plain = TokenEngine(folder, graph="off")
    wanted = grammars.run(plain)
    engine = proposing(folder, drafter, wanted, graph="off", overlap=True)
    assert isinstance(engine.worker, SpeculativeWorker)
    if changes:
        engine.worker.length = AtRandom()
    check_same(grammars.run(engine), wanted)
    for each in (plain, engine):
        each.worker.close()


@pytest.mark.parametrize("drafter", ["ngram", "guessing"])
def test_widths_that_change_from_step_to_step_change_no_text(
    folder: Path, plain: Ran, drafter: str, graph: str
) -> None:
    engine = proposing(folder, drafter, plain, graph=graph, overlap=True)
    assert isinstance(engine.worker, SpeculativeWorker)
    engine.worker.length = changing = AtRandom()
    for _ in range(2):
        check_same(run(engine), plain)
    assert changing.taken == set(LENGTHS)
    engine.worker.close()


def first(texts: Ran, count: int) -> Ran:
    """Return the results of the first requests."""
    return replace(texts, tokens=texts.tokens[:count], logprobs=texts.logprobs[:count], reasons=texts.reasons[:count])


@pytest.mark.parametrize("count", [3, 4])
def test_rows_that_pad_a_graph_leave_states_and_what_is_kept_alone(
    folder: Path, plain: Ran, count: int, graph: str
) -> None:
    """Nearly all steps have padding rows after those of `count` requests."""
    engine = proposing(folder, "guessing", plain, graph=graph)
    for _ in range(2):
        check_same(run(engine, PROMPTS[:count], samplings=SAMPLING[:count]), first(plain, count))
    assert graph == "off" or engine.paths != {"eager"}
    engine.worker.close()


class SpoilsEager(StatePool):
    """Keeps NaN in eager forwards; the values kept by a graph stay."""

    def keep(self, layer_id: int, taken: Tensor, rows: Tensor) -> None:
        super().keep(layer_id, taken * torch.nan, rows)


def test_a_forward_beside_a_replay_leaves_what_the_replay_kept(folder: Path, plain: Ran, graph: str) -> None:
    if graph == "off":
        return
    engine = proposing(folder, "guessing", plain, graph=graph, shadow=1)
    assert engine.worker.runner.state_pool is not None
    engine.worker.runner.state_pool.__class__ = SpoilsEager
    check_same(run(engine), plain)
    graphs = engine.worker.runner.graphs
    assert graphs is not None and graphs.shadow is not None and graphs.shadow.compared > 5
    engine.worker.close()


class OrAnything(Texts):
    """For an unknown text, returns its last token repeatedly."""

    def following(self, known: list[int], count: int) -> list[int]:
        is_known = any(text[: len(known)] == known[: len(text)] for text in self._texts)
        return super().following(known, count) if is_known else known[-1:] * count


@pytest.mark.needs("device")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_slot_that_changes_hands_between_two_verifications_brings_nothing_along(
    folder: Path, plain: Ran, slots: int, overlap: bool
) -> None:
    """More requests than request slots, and some earlier requests are aborted during a step."""
    settings = {"max_requests": slots, "graph_buckets": (1, 2), "page_size": 16, "max_batch_tokens": 16}
    engine = proposing(folder, "ngram", plain, graph="off", overlap=overlap, **settings)
    whole = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain.tokens, strict=True)]
    given_up = random_prompts(21, (30, 6, 11))
    assert isinstance(engine.worker, SpeculativeWorker)
    engine.worker.drafter = DRAFTERS["guessing"](4, OrAnything(whole), VOCABULARY)

    def prepare(requests: list[Request]) -> None:
        params = requests[1].params
        for index, prompt in enumerate(given_up):
            engine.scheduler.add(Request(f"gone{index}", np.array(prompt, np.int32), params, seed=index))
        for index in range(len(given_up)):
            for _ in range(3 + 2 * index):
                engine.loop.step()
            engine.scheduler.abort(f"gone{index}")

    check_same(run(engine, prepare=prepare), plain)
    engine.worker.close()


@pytest.mark.needs("device")
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_what_is_drawn_by_other_rules_has_the_oracle_s_log_probabilities(folder: Path, oracle: Any, rule: str) -> None:
    settings = {"speculative": "ngram", "draft_tokens": 3, "speculative_verify": rule, "poison": True}
    engine = TokenEngine(folder, graph="off", page_size=4, **settings)
    base = random_prompts(8, (9,))[0] * 3
    sampling = {"temperature": 1.0, "seed": 4, "logit_bias": {30: 8.0, 31: 8.0}}
    check_logprobs(engine.run([base + tail for tail in random_prompts(10, (3, 5, 2, 4))], 32, **sampling), oracle)
    counts = sums_of(engine.scheduler.drafts)
    assert 0 < counts.accepted < counts.proposed
    engine.worker.close()
