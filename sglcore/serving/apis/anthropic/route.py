"""POST /v1/messages and /v1/messages/count_tokens (Anthropic's API). Errors of both are in
Anthropic's form."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.answer import Stream, as_json, documented
from sglcore.serving.apis.anthropic.body import CountRequest, MessagesError, MessagesRequest
from sglcore.serving.apis.anthropic.events import MessageWriter
from sglcore.serving.apis.anthropic.request import chat_request, message_request, unread, unused
from sglcore.serving.apis.checks import check_model
from sglcore.serving.apis.request_params import completed
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.run import count_prompt, start_chat


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """Add both endpoints to the router. Counting needs the tokenizer only, so it answers before the
    model is loaded."""

    @router.post(
        "/v1/messages", tags=["messages"], responses=_documented("The message; with `stream`, its events", events="")
    )
    async def create(body: MessagesRequest) -> Response | Stream:
        """Answer a conversation made of blocks."""
        writer = MessageWriter(frontend, body.model)
        run = await start_chat(frontend, message_request(completed(body, frontend.sampling)))
        return await writer.respond(run, body.stream, sorted({*unused(body), *unread(body, run.ignored)}))

    @router.post("/v1/messages/count_tokens", tags=["messages"], responses=_documented("The number of tokens"))
    async def count(body: CountRequest) -> Response:
        """Count the prompt tokens of a conversation, without running the model."""
        check_model(frontend, body.model)
        request = chat_request(body, SamplingParams())
        return as_json({"input_tokens": await count_prompt(frontend, request, "messages")}, body.warnings())


def _documented(said: str, events: str | None = None) -> dict[int | str, Any]:
    return documented(said=said, events=events, error=MessagesError)
