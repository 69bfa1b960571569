"""What the warm-up asks an engine for: by each way that will serve, and no more than the model
holds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import State
from sglcore.schedule.request_errors import RequestError
from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas.warm_up import BESIDE_STEPS, BESIDE_TOKENS, DRAWS, PLAIN, WarmUpError, warm_up
from sglcore.worker.model_worker import Limits

LIMITS = Limits(1024, 8, 16, 64, 1024, 2000)


class Asked:
    """An engine that records its requests and emits one token of each in every step. `refuses`:
    parameters that the model does not take; `says` replaces the outputs."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.left: dict[str, int] = {}
        self.most_at_once = 0
        self.refuses: SamplingParams | None = None
        self.says: list[EngineOutput] | None = None
        self.embedding: Any = b"v"

    def add(self, name: str, prompt: list[int], params: SamplingParams, seed: int) -> None:
        if self.refuses is not None and replace(params, max_tokens=128, ignore_eos=False) == self.refuses:
            raise RequestError("not by this model")
        assert name not in self.left and params.ignore_eos
        self.prompts.append(prompt)
        self.params.append(params)
        self.left[name] = params.max_tokens or 0

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[EngineOutput]:
        self.most_at_once = max(self.most_at_once, len(self.left))
        names = list(self.left)
        self.left = {name: count - 1 for name, count in self.left.items() if count > 1}
        return [EngineOutput(name, 0, [7]) for name in names] if self.says is None else self.says

    def embed(self, name: str, ids: list[int]) -> Any:
        self.prompts.append(ids)
        return SimpleNamespace(state=State.FINISHED, embedding=self.embedding, error="planted")


def warmed(limits: Limits = LIMITS, **given: Any) -> Asked:
    engine: Any = Asked(limits)
    for name, value in given.items():
        setattr(engine, name, value)
    warm_up(engine)
    return engine


def test_a_device_whose_steps_do_not_run_ahead_draws_plainly_alone() -> None:
    engine = warmed()
    assert [replace(each, max_tokens=128, ignore_eos=False) for each in engine.params] == list(PLAIN)
    assert {each.max_tokens for each in engine.params} == {2} and engine.most_at_once == 1


def test_a_device_whose_steps_run_ahead_draws_in_every_way_and_beside_other_prompts() -> None:
    engine = warmed(replace(LIMITS, runs_ahead=True))
    ways = [replace(each, max_tokens=128, ignore_eos=False) for each in engine.params]
    assert ways[: len(PLAIN) + len(DRAWS)] == [*PLAIN, *DRAWS]
    rest = engine.params[len(PLAIN) + len(DRAWS) :]
    assert [each.max_tokens for each in rest] == [BESIDE_STEPS, *[1] * len(BESIDE_TOKENS)]
    assert [len(each) for each in engine.prompts[-len(BESIDE_TOKENS) :]] == list(BESIDE_TOKENS)
    assert engine.most_at_once == 2


def test_a_way_that_the_model_refuses_is_left_out() -> None:
    for refused in (DRAWS[0], DRAWS[-1]):
        engine = warmed(replace(LIMITS, runs_ahead=True), refuses=refused)
        ways = [replace(each, max_tokens=128, ignore_eos=False) for each in engine.params]
        assert refused not in ways and set(ways) >= {*PLAIN, *DRAWS} - {refused}
    with pytest.raises(RequestError):
        warmed(refuses=PLAIN[0])


@pytest.mark.parametrize(("length", "vocabulary"), [(2, 2000), (3, 2), (40, 5), (1024, 1)])
def test_prompts_fit_into_the_model_with_room_for_a_token(length: int, vocabulary: int) -> None:
    small = replace(LIMITS, max_model_len=length, vocab_size=vocabulary, runs_ahead=True)
    for prompt in warmed(small).prompts:
        assert 1 <= len(prompt) < length and all(0 <= token < vocabulary for token in prompt)
    assert len({tuple(prompt) for prompt in warmed(replace(LIMITS, runs_ahead=True)).prompts[-4:]}) == 4


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ([EngineOutput("warm-up", 0, [], "error", error="planted")], "first token failed: planted"),
        ([EngineOutput("warm-up", 0, [7]), EngineOutput("warm-up", 0, [], "error", error="planted")], "planted"),
        ([], "none came"),
        ([EngineOutput("warm-up", 0, [])], "none came"),
    ],
)
def test_a_model_of_which_no_token_comes_does_not_start(says: list[EngineOutput], said: str) -> None:
    with pytest.raises(WarmUpError, match=said):
        warmed(says=says)


def test_a_model_that_generates_nothing_embeds_one_prompt_and_starts_only_if_there_is_a_vector() -> None:
    encoder = replace(LIMITS, generates=False, runs_ahead=True)
    engine = warmed(encoder)
    assert len(engine.prompts) == 1 and not engine.params
    with pytest.raises(WarmUpError, match="first embedding failed: planted"):
        warmed(encoder, embedding=None)
