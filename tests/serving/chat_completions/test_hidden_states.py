"""Hidden states in answers, whole and streamed, read by OpenAI's client: they are transformers' for
the prompt and the tokens of the answer, and refusals name the field and a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from sglcore.config.server_config import ServerConfig
from sglcore.engine.start import embedded_model
from sglcore.serving.apis import shown_states
from tests.laws.hidden import TOLERANCE, their_states
from tests.serving.in_process import served_here

PROMPT = "Once upon a time"
MESSAGES: Any = [{"role": "user", "content": "Tell me a story."}]
SIZE = 256
"""The hidden size of the embedded model."""
MOST = 64 * SIZE
ASKED = {"return_token_ids": True}
SETTINGS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_requests": 8, "kv_cache_memory": 64 << 20}


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_here(None, ServerConfig(max_hidden_states=MOST), **SETTINGS) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def check(states: Any, oracle: Any, ids: list[int], kind: str, before: bool = False) -> None:
    """The states are those of transformers for these tokens."""
    wanted = their_states(oracle, ids[:-1], before)
    wanted = wanted if kind == "all" else wanted[-1]
    found = np.array(states, np.float32)
    assert found.shape == wanted.shape
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(found / scale, wanted / scale, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("asked", "kind"), [(True, "last"), ("last", "last"), ("all", "all")])
def test_each_choice_of_completions_has_its_states(
    client: openai.OpenAI, oracle: Any, asked: Any, kind: str, before: bool
) -> None:
    body = {"return_hidden_states": asked, "return_hidden_states_before_norm": before, **ASKED}
    found = client.completions.create(model="", prompt=PROMPT, max_tokens=6, n=2, seed=3, extra_body=body)
    texts = set()
    for choice in found.model_dump()["choices"]:
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        texts.add(choice["text"])
        check(choice["hidden_states"], oracle, ids, kind, before)
    assert len(texts) == 2


@pytest.mark.parametrize("kind", ["last", "all"])
def test_a_streams_last_part_of_each_choice_has_its_states(client: openai.OpenAI, oracle: Any, kind: str) -> None:
    body = {"return_hidden_states": kind, **ASKED}
    given: Any = {"model": "", "max_tokens": 6, "n": 2, "seed": 3, "stream": True, "extra_body": body}
    for create, prompt in (
        (client.completions.create, {"prompt": PROMPT}),
        (client.chat.completions.create, {"messages": MESSAGES}),
    ):
        ids, first, states = {0: [], 1: []}, [], {}
        for chunk in create(**prompt, **given):
            values = chunk.model_dump()
            first = values.get("prompt_token_ids") or first
            for choice in values["choices"]:
                first = choice.get("prompt_token_ids") or first
                ids[choice["index"]] += choice.get("token_ids") or []
                if choice["finish_reason"] is not None:
                    states[choice["index"]] = choice["hidden_states"]
                else:
                    assert "hidden_states" not in choice
        for index in (0, 1):
            check(states[index], oracle, first + ids[index], kind)


def test_a_chats_answer_has_its_states(client: openai.OpenAI, oracle: Any) -> None:
    body = {"return_hidden_states": "all", **ASKED}
    found = client.chat.completions.create(
        model="", messages=MESSAGES, max_tokens=5, temperature=0, extra_body=body
    ).model_dump()
    (choice,) = found["choices"]
    check(choice["hidden_states"], oracle, found["prompt_token_ids"] + choice["token_ids"], "all")


def test_a_stop_string_cuts_the_states_with_the_tokens(client: openai.OpenAI, oracle: Any) -> None:
    given: Any = {"model": "", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    plain = client.completions.create(**given)
    stop = plain.choices[0].text[8:11]
    for kind in ("last", "all"):
        body = {"return_hidden_states": kind, **ASKED}
        (choice,) = client.completions.create(**given, stop=[stop], extra_body=body).model_dump()["choices"]
        assert choice["finish_reason"] == "stop"
        check(choice["hidden_states"], oracle, choice["prompt_token_ids"] + choice["token_ids"], kind)


def test_scoring_a_prompt_gives_the_states_of_its_tokens(client: openai.OpenAI, oracle: Any) -> None:
    body = {"return_hidden_states": "all", **ASKED}
    found = client.completions.create(model="", prompt=PROMPT, max_tokens=0, echo=True, extra_body=body).model_dump()
    (choice,) = found["choices"]
    check(choice["hidden_states"], oracle, [*choice["prompt_token_ids"], 0], "all")


@pytest.mark.parametrize("streams", [False, True])
def test_generate_has_them_in_the_form_of_sglang(url: str, oracle: Any, streams: bool) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 5, "temperature": 0}, "stream": streams}
    ids = httpx.post(f"{url}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    for asked in (True, "all", "last"):
        answer = httpx.post(f"{url}/generate", json={**body, "return_hidden_states": asked})
        parts = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        found = httpx.Response(200, content=parts[-2]).json() if streams else answer.json()
        states = found["meta_info"]["hidden_states"]
        if asked != "last":
            prompt, *others = states
            assert (len(prompt), len(others)) == (len(ids), 4)
            states = [*prompt, *others]
        check(states, oracle, ids + found["output_ids"], "last" if asked == "last" else "all")


def test_an_answer_without_the_field_has_none(client: openai.OpenAI, url: str) -> None:
    for body in ({}, {"return_hidden_states": False}, {"return_hidden_states": None}):
        found = client.completions.create(model="", prompt=PROMPT, max_tokens=2, extra_body=body).model_dump()
        assert "hidden_states" not in found["choices"][0]
        found = httpx.post(f"{url}/generate", json={"text": PROMPT, **body}).json()
        assert "hidden_states" not in found["meta_info"]


def refused(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url + path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_more_values_than_the_limit_are_refused_before_anything_runs(url: str) -> None:
    body = {"prompt": PROMPT, "return_hidden_states": "all", "max_tokens": 62}
    chat = {"messages": MESSAGES, "return_hidden_states": "all"}  # up to the end of the context
    error = refused(url, "/v1/completions", body)
    assert error["param"] == "return_hidden_states"
    assert f"wanted at most {MOST} (max_hidden_states)" in error["message"]
    assert '"last", set a lower max_tokens, or start the server with a larger --max-hidden-states' in error["message"]
    for change in ({"n": 13}, {"prompt": [PROMPT] * 13}):
        assert "--max-hidden-states" in refused(url, "/v1/completions", {**body, "max_tokens": 2, **change})["message"]
    assert "max_hidden_states" in refused(url, "/v1/chat/completions", chat)["message"]
    assert httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 40}).status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={**body, "return_hidden_states": "last"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"return_hidden_states": "first"}),
        ("/v1/completions", {"return_hidden_states": 2}),
        ("/v1/completions", {"return_hidden_states_before_norm": True}),
        ("/generate", {"return_hidden_states_before_norm": True}),
    ],
)
def test_wrong_values_are_refused(url: str, path: str, body: dict[str, Any]) -> None:
    error = refused(url, path, {"prompt" if "v1" in path else "text": PROMPT, **body})
    assert error["param"] == next(iter(body)), error


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_endpoints_without_them_name_those_that_have_them(url: str, path: str) -> None:
    body: dict[str, Any] = {"return_hidden_states": True, "model": "", "max_tokens": 5, "messages": MESSAGES}
    if path == "/v1/responses":
        body = {"return_hidden_states": True, "input": "a"}
    answer = httpx.post(url + path, json=body)
    assert answer.status_code == 400 and "/v1/chat/completions and /generate return them" in answer.text


def test_one_request_that_is_refused_hurts_no_other(client: openai.OpenAI, url: str, oracle: Any) -> None:
    body = {"return_hidden_states": "all", **ASKED}
    stream: Any = client.completions.create(
        model="", prompt=PROMPT, max_tokens=20, temperature=0, stream=True, extra_body=body
    )
    ids, first, states = [], [], None
    for chunk in stream:
        if len(ids) == 3:
            refused(url, "/v1/completions", {"prompt": PROMPT, "return_hidden_states": "all", "max_tokens": 100})
        (choice,) = chunk.model_dump()["choices"]
        first, states = choice.get("prompt_token_ids") or first, choice.get("hidden_states")
        ids += choice["token_ids"]
    check(states, oracle, first + ids, "all")


def test_an_answer_in_many_pieces_is_the_same(
    client: openai.OpenAI, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown_states, "PIECE", 2 * SIZE)
    test_a_chats_answer_has_its_states(client, oracle)
