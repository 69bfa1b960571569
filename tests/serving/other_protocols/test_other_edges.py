"""Endpoints of llama-server and SGLang: a server that is not ready, the ids of requests, the names
in errors, and numbers that JSON does not have."""

from __future__ import annotations

from functools import cache
from typing import Any

import httpx
import pytest

from sglcore.engine.outputs import TextDelta
from sglcore.schedule.request_errors import ContextError
from sglcore.schedule.request_output import TokenLogprob
from sglcore.serving.apis.logprob_records import LEAST
from sglcore.serving.replicas.metrics.health import Health
from tests.serving.stubs import Application, StubGeneration, make_frontend, raises
from tests.serving.whole_answers import ASKS, SCORES, USER


@pytest.mark.parametrize("path", ["/props", "/slots"])
def test_the_state_of_a_server_without_a_model_is_not_there_yet(path: str) -> None:
    answer = Application(make_frontend(health=Health())).send("GET", path)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"


@cache
def shared() -> tuple[Any, Application]:
    """A frontend and the application over it, made once."""
    frontend = make_frontend()
    return frontend, Application(frontend)


def send(path: str, body: Any, generate: Any = None) -> httpx.Response:
    frontend, application = shared()
    frontend.generate = generate
    return application.send("POST", path, body)


def names(path: str, body: Any) -> list[tuple[Any, Any]]:
    """The ids under which the engine runs the prompts of a request, and those of its answer."""
    found: list[tuple[Any, Any]] = []

    async def generate(prompt: Any, *given: Any, **named: Any) -> StubGeneration:
        found.append((named["request_id"], named["answer_id"]))
        return StubGeneration([TextDelta("r", 0, "A", (5,), "stop")])

    answer = send(path, body, generate)
    assert answer.status_code == 200, answer.text
    return found


def test_a_request_of_sglang_runs_under_the_id_that_it_gives_and_else_under_a_new_one() -> None:
    assert names("/generate", {"text": "a", "rid": "mine"}) == [("mine", "")]
    several = names("/generate", {"text": ["a", "b"], "rid": "mine"})
    assert several == [("mine-0", "mine"), ("mine-1", "mine")]
    ((first, _),), ((second, _),) = (names("/generate", {"text": "a"}) for _ in range(2))
    assert first and second and first != second
    assert names("/completion", {"prompt": ["a", "b"]}) == [(None, "")] * 2


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/completion", {"prompt": "a", "n_predict": 3, "min_tokens": 5}, "raise n_predict"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"max_new_tokens": 3, "min_new_tokens": 5}},
            "raise sampling_params.max_new_tokens",
        ),
    ],
)
def test_an_error_about_two_fields_has_both_names_of_the_protocol(path: str, body: Any, said: str) -> None:
    answer = send(path, body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("protocol", SCORES)
def test_a_token_of_no_probability_has_the_least_number_in_every_protocol(protocol: str, streams: bool) -> None:
    score = TokenLogprob(300, -float("inf"), 9, ((301, -0.25), (302, -float("inf"))))

    async def generate(*given: Any, **named: Any) -> StubGeneration:
        made = StubGeneration([TextDelta("r", 0, "A", (300,), "stop", (score,))])
        made.output.outputs[0].logprobs, made.output.outputs[0].token_ids = [score], [300]
        return made

    path, body = ASKS[protocol]
    answer = send(path, {**body, **SCORES[protocol], "stream": streams}, generate)
    assert answer.status_code == 200 and answer.text.count(str(LEAST)) >= 2, answer.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, "messages"),
        ("/v1/completions", {"prompt": "a"}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt[0]"),
        ("/v1/responses", {"input": "a"}, "input"),
        ("/completion", {"prompt": "a"}, "prompt"),
        ("/completion", {"prompt": [[5], [6]]}, "prompt[0]"),
        ("/generate", {"text": "a"}, "text"),
        ("/generate", {"text": ["a", "b"]}, "text[0]"),
        ("/generate", {"input_ids": [5]}, "input_ids"),
        ("/generate", {"input_ids": [[5], [6]]}, "input_ids[0]"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_by_the_field_that_it_came_in(path: str, body: Any, param: str) -> None:
    answer = send(path, body, raises(ContextError("planted")))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["message"], error["param"], error["code"]) == ("planted", param, "context_length_exceeded")
