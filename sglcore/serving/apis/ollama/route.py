"""POST /api/chat, generate, embed, embeddings and show, GET /api/tags, ps and version (Ollama's
API). Their errors are in Ollama's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Response

from sglcore import __version__
from sglcore.engine.model_card import ModelCard, read_card
from sglcore.serving.apis.answer import WITH_BODY, Answer, Stream, as_json, documented
from sglcore.serving.apis.checks import check_ready
from sglcore.serving.apis.ollama import models
from sglcore.serving.apis.ollama.answers import (
    ModelsLoaded,
    ModelsThere,
    OllamaChat,
    OllamaError,
    OllamaText,
    OneVector,
    Shown,
    Vectors,
    Version,
)
from sglcore.serving.apis.ollama.body import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
    VectorFields,
)
from sglcore.serving.apis.ollama.events import LinesWriter, as_message, as_text
from sglcore.serving.apis.ollama.names import served_name
from sglcore.serving.apis.ollama.request import chat_request, params_of, plain_prompt, text_request, unread
from sglcore.serving.apis.pooling.body import EmbeddingBody
from sglcore.serving.apis.pooling.request import embedded
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.run import ChatRun, plain_run, start_chat
from sglcore.serving.replicas.engine_frontend import Pooled
from sglcore.serving.replicas.runs import start_runs
from sglcore.serving.replicas.server_errors import InvalidRequest

PROTOCOL = "0.12.11"
"""The version of Ollama whose fields these endpoints have; log-probabilities are the newest
ones."""


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """Add Ollama's eight endpoints to the router. All but lists and version need a ready model;
    lists read the checkpoint's files once, in a thread."""
    _add_chat(router, frontend)
    _add_generate(router, frontend)
    _add_vectors(router, frontend)
    _add_models(router, frontend)


def _add_chat(router: APIRouter, frontend: ChatFrontend) -> None:
    texts = TokenTexts(frontend.codec)

    @router.post("/api/chat", tags=["ollama"], responses=_streamed(OllamaChat))
    async def chat(body: OllamaChatBody) -> Response | Stream:
        """Generate the next message of a conversation."""
        writer = LinesWriter(frontend, texts, body, as_message)
        if not body.messages:
            return as_json(writer.loaded(), body.warnings())
        run = await start_chat(frontend, chat_request(body, frontend))
        return await writer.respond(run, body.stream is not False, (*body.warnings(), *unread(body, run.ignored)))


def _add_generate(router: APIRouter, frontend: ChatFrontend) -> None:
    texts = TokenTexts(frontend.codec)

    @router.post("/api/generate", tags=["ollama"], responses=_streamed(OllamaText))
    async def generate(body: OllamaGenerateBody) -> Response | Stream:
        """Generate the answer to a text, or its continuation."""
        writer = LinesWriter(frontend, texts, body, as_text)
        if not body.prompt:
            return as_json(writer.loaded(), body.warnings())
        plain = plain_prompt(body, frontend)
        if plain is None:
            run = await start_chat(frontend, text_request(body, frontend))
            notes = unread(body, run.ignored)
        else:
            run = await _continued(body, plain, frontend)
            notes = ["think"] if body.think is not None else []
        return await writer.respond(run, body.stream is not False, (*body.warnings(), *notes))


async def _continued(body: OllamaGenerateBody, prompt: str, frontend: ChatFrontend) -> ChatRun:
    """Start and return the run of a prompt that is continued without a chat template: the whole
    text is content. Waits until the engine has the request, not for the answer."""
    params = params_of(body, frontend)
    form = "format" if params.grammar is not None else ""
    return plain_run(await start_runs(frontend, [prompt], params, form=form), params, form)


def _add_vectors(router: APIRouter, frontend: ChatFrontend) -> None:
    async def vectors(body: VectorFields, **asked: Any) -> list[Pooled]:
        given = {"model": served_name(frontend, body.model), **asked}
        return await embedded(frontend, EmbeddingBody(**given))

    @router.post("/api/embed", tags=["ollama"], responses=_documented(Vectors))
    async def embed(body: OllamaEmbedBody) -> Response:
        """Compute a vector of length 1 for each text, in order."""
        began, name = time.perf_counter(), body.model or served_name(frontend, None)
        inputs = [body.input] if isinstance(body.input, str) else body.input
        asked = {"truncate": body.truncate is not False, "dimensions": body.dimensions}
        found = await vectors(body, input=inputs, **asked) if inputs and body.input else []
        answer = {
            "model": name,
            "embeddings": [_unit(each.vector).tolist() for each in found],
            "total_duration": int((time.perf_counter() - began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(each.tokens for each in found),
        }
        return as_json(answer, body.warnings())

    @router.post("/api/embeddings", tags=["ollama"], responses=_documented(OneVector))
    async def embeddings(body: OllamaEmbeddingsBody) -> Response:
        """Compute the vector of one text, not scaled to length 1."""
        found = await vectors(body, input=body.prompt, truncate=True) if body.prompt else []
        return as_json({"embedding": found[0].vector.tolist() if found else []}, body.warnings())


def _add_models(router: APIRouter, frontend: ChatFrontend) -> None:
    card = _once(lambda: asyncio.to_thread(read_card, frontend.model_path))

    @router.get("/api/tags", tags=["ollama"], responses=_documented(ModelsThere, (401, 403, 500)))
    async def tags() -> Response:
        """List the names of the served model."""
        return as_json(models.files(frontend, await card()))

    @router.get("/api/ps", tags=["ollama"], responses=_documented(ModelsLoaded, (401, 403, 500)))
    async def running() -> Response:
        """List the names of the served model; none before it is loaded."""
        return as_json(models.runs(frontend, await card()))

    @router.post("/api/show", tags=["ollama"], responses=_documented(Shown))
    async def show(body: OllamaShowBody) -> Response:
        """Return the facts about a model."""
        asked = body.model or body.name
        if not asked:
            raise InvalidRequest("the field model is missing", param="model")
        name = served_name(frontend, asked)
        check_ready(frontend)
        return as_json(models.shown(frontend, await card(), name), body.warnings())

    @router.get("/api/version", tags=["ollama"], responses=_documented(Version, (401, 403, 500)))
    async def version() -> Response:
        """Return the version of Ollama's API that this server implements."""
        return as_json({"version": PROTOCOL, "sglcore": __version__})


def _once(make: Callable[[], Awaitable[ModelCard]]) -> Callable[[], Awaitable[ModelCard]]:
    """Return a function that calls and awaits `make` at its first call and then returns the same
    result: the files of a served model do not change. If `make` fails, the next call repeats it;
    calls at the same time before the first result may each call `make`."""
    kept: list[ModelCard] = []

    async def get() -> ModelCard:
        if not kept:
            kept.append(await make())
        return kept[0]

    return get


def _unit(vector: np.ndarray) -> np.ndarray:
    """Return a vector [N] scaled to length 1, as a new array; a zero vector stays zero."""
    return vector / (float(np.linalg.norm(vector)) or 1.0)


def _streamed(answer: type[Answer]) -> dict[int | str, Any]:
    said = "The answer; unless `stream` is false, its parts, one on each line"
    return documented(answer, said=said, lines=True, error=OllamaError)


def _documented(answer: type[Answer], statuses: Sequence[int] = WITH_BODY) -> dict[int | str, Any]:
    return documented(answer, statuses=statuses, error=OllamaError)
