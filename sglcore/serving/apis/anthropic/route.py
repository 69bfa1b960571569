"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API. Its errors are in Anthropic's schema, on every path below."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.answer import Stream, as_json, documented, named_events
from sglcore.serving.apis.anthropic.body import CountRequest, MessagesError, MessagesRequest
from sglcore.serving.apis.anthropic.events import MessageWriter, error_body
from sglcore.serving.apis.anthropic.request import chat_request, message_request, unread, unused
from sglcore.serving.apis.checks import check_generates, check_model
from sglcore.serving.apis.params import completed
from sglcore.serving.chat.frontend import ChatFrontend
from sglcore.serving.chat.run import count_prompt, start_chat
from sglcore.serving.replicas.errors import told


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """Both of them."""

    @router.post(
        "/v1/messages",
        tags=["messages"],
        responses=_documented("The message, or with `stream` its events", events=""),
        summary="Answer a conversation made of blocks",
    )
    async def create(body: MessagesRequest) -> Response | Stream:
        model = check_model(frontend, body.model)
        check_generates(frontend)
        request = message_request(completed(body, frontend.sampling))
        run = await start_chat(frontend, request)
        writer = MessageWriter(frontend, model, run)
        warnings = sorted({*unused(body), *unread(body, run.ignored)})
        if body.stream:
            return Stream(writer.events(), run, warnings, [run.output], _last_events)
        async with run:
            return as_json(await writer.answer(), warnings, [run.output])

    @router.post(
        "/v1/messages/count_tokens",
        tags=["messages"],
        responses=_documented("The number of tokens"),
        summary="Count the tokens of a conversation",
    )
    async def count(body: CountRequest) -> Response:
        check_model(frontend, body.model)
        request = chat_request(body, SamplingParams())
        return as_json({"input_tokens": await count_prompt(frontend, request, "messages")}, body.warnings())


def _last_events(error: Exception) -> bytes:
    return named_events([error_body(told(error))])


def _documented(said: str, events: str | None = None) -> dict[int | str, Any]:
    return documented(said=said, events=events, error=MessagesError)
