"""POST /v1/chat/completions and /v1/completions; GET /v1/models and /v1/models/{id} (OpenAI's
API)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from sglcore.serving.apis.answer import Answer, Stream, as_json, documented
from sglcore.serving.apis.anthropic.models import VERSION, model_card, model_list
from sglcore.serving.apis.checks import check_model
from sglcore.serving.apis.openai.answers import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    ModelCard,
    ModelList,
)
from sglcore.serving.apis.openai.body import ChatBody, CompletionBody
from sglcore.serving.apis.openai.events import ChatWriter, CompletionWriter
from sglcore.serving.apis.openai.request import chat_request, completion_request
from sglcore.serving.apis.request_params import completed
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.run import start_chat
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.runs import start_runs

_ABOUT_TEXT = ("echo", "logprobs", "prompt_logprobs")
"""Fields of completions that are refused without a tokenizer; /generate returns token ids with
their log-probabilities."""


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """Add all endpoints to the router. The lists of models answer before the model is loaded."""
    _add_generation(router, frontend)
    _add_models(router, frontend)


def _add_generation(router: APIRouter, frontend: ChatFrontend) -> None:
    texts = TokenTexts(frontend.codec)

    @router.post("/v1/chat/completions", tags=["chat"], responses=_streamed(ChatAnswer, ChatChunk))
    async def chat(body: ChatBody) -> Response | Stream:
        """Generate the next message of a conversation."""
        writer = ChatWriter(frontend, texts, body)
        run = await start_chat(frontend, chat_request(completed(body, frontend.sampling), frontend.config, writer.id))
        values = body.chat_template_kwargs or {}
        unread = (f"chat_template_kwargs.{name}" if name in values else name for name in run.ignored)
        return await writer.respond(run, body.stream, (*body.warnings(), *unread))

    @router.post("/v1/completions", tags=["completions"], responses=_streamed(CompletionAnswer, CompletionChunk))
    async def completions(body: CompletionBody) -> Response | Stream:
        """Continue one prompt or several."""
        writer = CompletionWriter(frontend, texts, body)
        for name, value in body.given(*_ABOUT_TEXT).items():
            if value is not False:
                frontend.codec.need_text(name, name)
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
        return await writer.respond(runs, body.stream, body.warnings())


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

    @router.get("/v1/models", tags=["models"], responses=documented(ModelList, statuses=()))
    async def all_models(request: Request) -> Response:
        """List the served names; with the header anthropic-version, in the format of Anthropic."""
        if VERSION in request.headers:
            return as_json(model_list(frontend.names, frontend.created))
        return as_json(ModelList(object="list", data=[card(name) for name in frontend.names]))

    @router.get("/v1/models/{name:path}", tags=["models"], responses=documented(ModelCard, statuses=(404,)))
    async def one_model(name: str, request: Request) -> Response:
        """Describe one served name; 404 for any other."""
        if not name:
            return await all_models(request)
        check_model(frontend, name)
        return as_json(model_card(name, frontend.created) if VERSION in request.headers else card(name))


def _streamed(answer: type[Answer], chunk: type[Answer]) -> dict[int | str, Any]:
    said = f"The answer; with `stream`, events of {chunk.__name__} that end with [DONE]"
    return documented(answer, said=said, events=chunk.__name__)
