"""Ollama's answers are those that the OpenAPI document describes: every field is there, with its
type."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.engine.model_card import read_card
from sglcore.engine.outputs import TextDelta
from sglcore.serving.apis.answer import Answer
from sglcore.serving.apis.anthropic.body import UNTHREADED, MessagesError
from sglcore.serving.apis.anthropic.events import error_body
from sglcore.serving.apis.ollama import answers
from sglcore.serving.replicas.engine_frontend import Pooled
from sglcore.serving.replicas.server_errors import Failure
from tests.serving.scripted import Stage, staged
from tests.serving.stubs import DEMO, Application, StubGeneration, make_frontend
from tests.serving.whole_answers import ASKS, SAYS, SCORES, TOOLS

MODELS: dict[str, type[Answer]] = {"ollama_chat": answers.OllamaChat, "ollama_generate": answers.OllamaText}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig()) as stage:
        yield stage


@pytest.fixture(scope="module")
def served() -> Application:
    frontend: Any = make_frontend()
    frontend.names, frontend.model_path = ("a", "b:7b"), DEMO

    async def generate(*given: Any, **named: Any) -> StubGeneration:
        made = StubGeneration([TextDelta("r", 0, "A", (5,), "stop")])
        made.output.outputs[0].warnings = ["format#/not"]
        return made

    frontend.generate = generate
    return Application(frontend)


@pytest.fixture(scope="module")
def encoder() -> Application:
    frontend: Any = make_frontend()
    frontend.info = SimpleNamespace(**{**vars(frontend.info), "generates": False, "limits": {"num_labels": 0}})
    frontend.longest_prompt, frontend.model_path = lambda info, embeds: 9, DEMO

    async def pooled(texts: Any) -> list[Pooled]:
        return [Pooled(np.array([3.0, 4.0], "<f4"), 1) for _ in texts]

    frontend.pooled = pooled
    return Application(frontend)


def is_described(model: type[Answer], value: Any) -> None:
    """Require that the model has all fields of the answer and no field of another type."""
    assert model.model_validate(value, strict=True).model_dump(exclude_unset=True) == value


@pytest.mark.parametrize("protocol", MODELS)
@pytest.mark.parametrize("name", [name for name, script in SAYS.items() if script.get("reason") != "error"])
def test_each_line_and_whole_answer_has_the_described_fields(stage: Stage, protocol: str, name: str) -> None:
    path, body = ASKS[protocol]
    asked = {**body, **TOOLS.get(protocol, {}), **SCORES[protocol]}
    for streams in (False, True):
        script = SAYS[name]
        stage.speak(*script["says"], **{key: value for key, value in script.items() if key != "says"})
        found = httpx.post(stage.url + path, json={**asked, "stream": streams}, trust_env=False)
        lines = [httpx.Response(200, text=line).json() for line in found.text.splitlines()]
        assert lines
        for line in lines:
            is_described(MODELS[protocol], line)


@pytest.mark.parametrize(
    ("method", "path", "body", "model"),
    [
        ("POST", "/api/chat", {"messages": [{"role": "user", "content": "a"}], "stream": False}, answers.OllamaChat),
        ("POST", "/api/generate", {"prompt": "a", "stream": False}, answers.OllamaText),
        ("POST", "/api/chat", {}, answers.OllamaChat),
        ("POST", "/api/generate", {}, answers.OllamaText),
        ("GET", "/api/tags", None, answers.ModelsThere),
        ("GET", "/api/ps", None, answers.ModelsLoaded),
        ("POST", "/api/show", {"model": "a"}, answers.Shown),
        ("GET", "/api/version", None, answers.Version),
        ("POST", "/api/show", {}, answers.OllamaError),
        ("POST", "/api/show", {"model": "c"}, answers.OllamaError),
    ],
)
def test_an_answer_has_the_described_fields(
    served: Application, method: str, path: str, body: Any, model: type[Answer]
) -> None:
    answer = served.send(method, path, body)
    assert (answer.status_code == 200) is (model is not answers.OllamaError), answer.text
    is_described(model, answer.json())
    assert "stream" not in (body or {}) or answer.json()["warnings"] == ["format#/not"]


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/api/embed", {"input": ["a", "b"]}, answers.Vectors),
        ("/api/embed", {"input": []}, answers.Vectors),
        ("/api/embeddings", {"prompt": "a"}, answers.OneVector),
        ("/api/show", {"model": "demo"}, answers.Shown),
    ],
)
def test_an_answer_of_a_model_that_embeds_has_the_described_fields(
    encoder: Application, path: str, body: Any, model: type[Answer]
) -> None:
    answer = encoder.send("POST", path, body)
    assert answer.status_code == 200, answer.text
    is_described(model, answer.json())


@pytest.mark.parametrize("code", [None, "other", UNTHREADED])
def test_an_error_of_messages_has_the_described_fields(code: str | None) -> None:
    is_described(MessagesError, error_body(Failure(400, "no", "any", "a", code)))


def test_a_loaded_model_stays_loaded_and_has_the_digest_of_its_files(served: Application) -> None:
    (listed, _), (loaded, _) = (served.send("GET", f"/api/{path}").json()["models"] for path in ("tags", "ps"))
    assert listed["digest"] == loaded["digest"] == read_card(DEMO).digest and len(listed["digest"]) == 64
    assert datetime.fromisoformat(loaded["expires_at"]).year > datetime.now(UTC).year + 100
