"""POST /v1/chat/completions, /v1/completions and /v1/embeddings; GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Response

from sglcore.serving.apis.answer import Answer, Stream, as_json, documented
from sglcore.serving.apis.checks import check_limit, check_model, check_ready, fingerprint
from sglcore.serving.apis.openai.answers import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    EmbeddingAnswer,
    ModelCard,
    ModelList,
)
from sglcore.serving.apis.openai.body import ChatBody, CompletionBody, EmbeddingBody, as_prompts
from sglcore.serving.apis.openai.events import ChatWriter, CompletionWriter
from sglcore.serving.apis.openai.request import chat_request, completion_request
from sglcore.serving.apis.params import completed
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.chat.frontend import ChatFrontend
from sglcore.serving.chat.run import start_chat
from sglcore.serving.replicas.errors import InvalidRequest, blame
from sglcore.serving.replicas.frontend import Frontend
from sglcore.serving.replicas.runs import start_runs


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """All of them."""
    _add_generation(router, frontend)
    _add_models(router, frontend)

    @router.post(
        "/v1/embeddings", tags=["embeddings"], responses=documented(EmbeddingAnswer), summary="Vectors of texts"
    )
    async def embeddings(body: EmbeddingBody) -> Response:
        return await _embeddings(frontend, body)


def _add_generation(router: APIRouter, frontend: ChatFrontend) -> None:
    texts = TokenTexts(frontend.codec)

    @router.post(
        "/v1/chat/completions",
        tags=["chat"],
        responses=_streamed(ChatAnswer, ChatChunk),
        summary="The next message of a conversation",
    )
    async def chat(body: ChatBody) -> Response | Stream:
        writer = ChatWriter(frontend, texts, body)
        run = await start_chat(frontend, chat_request(completed(body, frontend.sampling), frontend.config, writer.id))
        values = body.chat_template_kwargs or {}
        unread = (f"chat_template_kwargs.{name}" if name in values else name for name in run.ignored)
        warnings = (*body.warnings(), *unread)
        if body.stream:
            return Stream(writer.events(run), run, warnings, [run.output])
        async with run:
            return as_json(await writer.answer(run), warnings, [run.output])

    @router.post(
        "/v1/completions",
        tags=["completions"],
        responses=_streamed(CompletionAnswer, CompletionChunk),
        summary="Continue texts",
    )
    async def completions(body: CompletionBody) -> Response | Stream:
        writer = CompletionWriter(frontend, texts, body)
        request = completion_request(completed(body, frontend.sampling), frontend.config)
        runs = await start_runs(
            frontend,
            request.prompts,
            request.params,
            special=body.add_special_tokens is not False,
            progress=bool(body.return_progress and body.stream),
            name=writer.id,
            form=request.form,
        )
        if body.stream:
            return Stream(writer.events(runs), runs, body.warnings(), runs.outputs)
        async with runs:
            return as_json(await writer.answer(runs), body.warnings(), runs.outputs)


def _add_models(router: APIRouter, frontend: Frontend) -> None:
    def card(name: str) -> ModelCard:
        length = frontend.info.max_model_len if frontend.info is not None else None
        return ModelCard(
            id=name,
            object="model",
            created=frontend.created,
            owned_by="sglcore",
            max_model_len=length,
            root=frontend.names[0],
            parent=None,
        )

    @router.get("/v1/models", tags=["models"], responses=documented(ModelList, statuses=()), summary="The served names")
    async def all_models() -> Response:
        return as_json(ModelList(object="list", data=[card(name) for name in frontend.names]))

    @router.get(
        "/v1/models/{name:path}",
        tags=["models"],
        responses=documented(ModelCard, statuses=(404,)),
        summary="One name",
    )
    async def one_model(name: str) -> Response:
        if not name:
            return await all_models()
        check_model(frontend, name)
        return as_json(card(name))


def _streamed(answer: type[Answer], chunk: type[Answer]) -> dict[int | str, Any]:
    said = f"The answer, or with `stream` events of {chunk.__name__} that end with [DONE]"
    return documented(answer, said=said, events=chunk.__name__)


async def _embeddings(frontend: Frontend, body: EmbeddingBody) -> Response:
    model = check_model(frontend, body.model)
    check_ready(frontend)
    inputs = as_prompts(body.input)
    check_limit("input", len(inputs), frontend.config.max_prompts, "texts")
    if frontend.info is not None and frontend.info.generates:
        raise InvalidRequest(
            "this model generates text and has no embeddings",
            wanted="an encoder, such as BERT, or this one with --task embed",
            remedy="use /v1/completions, or serve one of those",
            param="model",
            code="model_does_not_embed",
        )
    with blame("input"):
        found = await frontend.embed(inputs, body.prompt_name)
    width = len(found[0].vector)
    if body.dimensions not in (None, width):
        raise InvalidRequest(
            f"dimensions is {body.dimensions}", wanted=f"{width}, which this model has", param="dimensions"
        )
    tokens = sum(one.tokens for one in found)
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": place, "embedding": _written(one.vector, body.encoding_format)}
            for place, one in enumerate(found)
        ],
        "model": model,
        "system_fingerprint": fingerprint(frontend),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return as_json(answer, body.warnings())


def _written(vector: np.ndarray, form: str | None) -> Any:
    data = np.ascontiguousarray(vector, dtype="<f4")
    return base64.b64encode(data.tobytes()).decode("ascii") if form == "base64" else data.tolist()
