"""A checkpoint's sampling defaults apply to requests of every protocol that do not set them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.openai.body import CompletionBody
from sglcore.serving.apis.openai.request import completion_request
from sglcore.serving.apis.request_params import completed
from tests.serving.scripted import MODEL, content, staged

SAYS = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1}
CHAT: Any = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/chat/completions", CHAT, ""),
        ("/v1/completions", {"prompt": "x"}, ""),
        ("/v1/messages", {**CHAT, "max_tokens": 4}, ""),
        ("/v1/responses", {"input": "x"}, ""),
        ("/completion", {"prompt": "x"}, ""),
        ("/generate", {"text": "x"}, "sampling_params"),
        ("/api/chat", {**CHAT, "stream": False}, "options"),
        ("/api/generate", {"prompt": "x", "stream": False}, "options"),
    ],
)
def test_a_request_is_drawn_as_the_checkpoint_says_but_for_what_it_says_itself(
    path: str, body: dict[str, Any], place: str
) -> None:
    with staged(ServerConfig(), **SAYS) as stage:
        for own in ({}, {"temperature": None, "top_k": 0, "top_p": 1.0}):
            script = stage.speak(content("x"))
            said = {place: own} if place else own
            answer = httpx.post(stage.url + path, json={"model": MODEL, **body, **said}, timeout=60)
            assert answer.status_code == 200, answer.text
            wanted = {**SAYS, **{name: value for name, value in own.items() if value is not None}}
            assert {name: getattr(script.params[0], name) for name in SAYS} == wanted


def test_a_completion_is_drawn_as_the_checkpoint_says() -> None:
    body = completed(CompletionBody.model_validate({"prompt": "x", "top_k": 3}), SAYS)
    assert completion_request(body, ServerConfig()).params == SamplingParams(max_tokens=16, **{**SAYS, "top_k": 3})
