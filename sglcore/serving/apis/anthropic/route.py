"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API. Its errors are in Anthropic's schema, on every path below."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

from fastapi import APIRouter, Request, Response

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.anthropic.body import CountRequest, MessagesError, MessagesRequest
from sglcore.serving.apis.anthropic.events import Event, MessageWriter
from sglcore.serving.apis.anthropic.request import chat_request, read_request, unread
from sglcore.serving.apis.count import count_prompt
from sglcore.serving.apis.shared import ERRORS, check_generates, check_model, events_of, fingerprint, warned
from sglcore.serving.chat.run import ChatRun, start_chat
from sglcore.serving.http.bodies import JsonRoute
from sglcore.serving.http.sse import EventStream, encode, while_connected
from sglcore.serving.replicas.errors import Unanswered, told
from sglcore.serving.replicas.frontend import Frontend


def routes(frontend: Frontend) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["messages"], route_class=JsonRoute)

    @router.post("/v1/messages", responses=_documented(streams=True), summary="Answer a conversation made of blocks")
    async def create(body: MessagesRequest, request: Request) -> Response:
        call = _Call(frontend, body)
        if not body.stream:
            return await while_connected(request, call.answer())
        run = await call.start()
        return EventStream(call.chunks(run), run, headers=call.headers(run), on_error=_error_event)

    @router.post(
        "/v1/messages/count_tokens", responses=_documented(streams=False), summary="Count the tokens of a conversation"
    )
    async def count(body: CountRequest) -> Response:
        check_model(frontend, body.model)
        found = {"input_tokens": await count_prompt(frontend, chat_request(body, SamplingParams()), "messages")}
        return Response(encode(found), 200, warned(body.warnings()), "application/json")

    return router


class _Call:
    """One request: what it wants, and how its answer is written. Raises what refuses it."""

    def __init__(self, frontend: Frontend, body: MessagesRequest) -> None:
        self.frontend, self.body = frontend, body
        self.model = check_model(frontend, body.model)
        check_generates(frontend)
        self.turn = read_request(body)

    async def start(self) -> ChatRun:
        """Give the conversation to an engine."""
        return await start_chat(self.frontend, self.turn.request)

    def headers(self, run: ChatRun) -> dict[str, str]:
        """The header about what of the request had no effect."""
        return warned(sorted({*self.turn.warnings, *unread(self.body, run.ignored)}))

    async def answer(self) -> Response:
        """The whole message; waits for its end."""
        async with await self.start() as run:
            writer = self._writer(run)
            async for event in run:
                writer.take(event)
            writer.end(run.generation.output)
        if writer.failure is not None:
            raise Unanswered(writer.failure)
        return Response(encode(writer.message), 200, self.headers(run), "application/json")

    async def chunks(self, run: ChatRun) -> AsyncGenerator[bytes, None]:
        """The message's events as they happen. What comes before the first word is raised before anything is sent."""
        writer, events = self._writer(run), aiter(run)
        first = await anext(events)
        yield _sent([*writer.start(), *writer.take(first)])
        async for event in events:
            made = writer.take(event)
            if made:
                yield _sent(made)
        if writer.failure is not None:
            raise Unanswered(writer.failure)
        yield _sent(writer.end(run.generation.output))

    def _writer(self, run: ChatRun) -> MessageWriter:
        info = self.frontend.info
        return MessageWriter(
            self.model,
            len(run.generation.output.prompt_token_ids),
            max_model_len=info.max_model_len if info is not None else 0,
            fingerprint=fingerprint(self.frontend),
        )


def _documented(*, streams: bool) -> dict[int | str, Any]:
    """The `responses` of an endpoint: an object, events too if it streams, and errors in Anthropic's schema."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = events_of()
    said = "The message, or with `stream` its events" if streams else "The number of tokens"
    errors = {status: {**found, "model": MessagesError} for status, found in ERRORS.items() if status != 405}
    return {200: {"description": said, "content": content}, **errors}


def _error_event(error: Exception) -> bytes:
    return _sent([told(error).anthropic()])


def _sent(events: Iterable[Event]) -> bytes:
    return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n" for event in events)
