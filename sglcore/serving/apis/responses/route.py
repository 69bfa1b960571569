"""POST /v1/responses, and the responses that it keeps: GET and DELETE /v1/responses/{id}, /v1/responses/{id}/input_items."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.count import count_prompt
from sglcore.serving.apis.fields import own_names
from sglcore.serving.apis.responses.body import CountRequest, ResponsesRequest
from sglcore.serving.apis.responses.events import Event, ResponseWriter
from sglcore.serving.apis.responses.items import input_items, page_of
from sglcore.serving.apis.responses.request import chat_request, read_input, read_request, unread
from sglcore.serving.apis.responses.store import ResponseStore, Stored
from sglcore.serving.apis.shared import ERRORS, check_generates, check_model, events_of, fingerprint, warned
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.chat.run import ChatRun, start_chat
from sglcore.serving.http.bodies import JsonRoute
from sglcore.serving.http.sse import EventStream, encode, while_connected
from sglcore.serving.replicas.errors import InvalidRequest, Unanswered, told
from sglcore.serving.replicas.frontend import Frontend

_OWN_NAMES = MappingProxyType({"messages": "input", "response_format": "text.format"})
"""Fields of the chat endpoint, and what this one calls them."""
_BODY = tuple(status for status in ERRORS if status != 405)
"""Error statuses of an endpoint that takes a body."""
_ADDRESS = (400, 404)
"""Those of one that takes an id alone."""


def routes(frontend: Frontend) -> APIRouter:
    """The routes. What they keep is in this process only, and bounded."""
    router = APIRouter(tags=["responses"], route_class=JsonRoute)
    store = ResponseStore(frontend.config.max_stored_responses)
    texts = TokenTexts(frontend.codec)

    @router.post(
        "/v1/responses", responses=_documented(_BODY, streams=True), summary="Answer a conversation made of items"
    )
    async def create(body: ResponsesRequest, request: Request) -> Response:
        call = _Call(frontend, store, texts, body)
        if not body.stream:
            return await while_connected(request, call.answer())
        run = await call.start()
        return EventStream(call.chunks(run), run, headers=call.headers(run))

    @router.post("/v1/responses/input_tokens", responses=_documented(_BODY), summary="Count the tokens of an input")
    async def count(body: CountRequest) -> Response:
        check_model(frontend, body.model)
        earlier = _earlier(store, body.previous_response_id)
        chat = chat_request(body, [*earlier, *read_input(body, earlier)], SamplingParams())
        found = {"object": "response.input_tokens", "input_tokens": await count_prompt(frontend, chat, "input")}
        return _json(found, warned(body.warnings()))

    _add_kept(router, store)
    return router


def _add_kept(router: APIRouter, store: ResponseStore) -> None:
    """The routes of responses that are kept."""

    @router.get("/v1/responses/{response_id}", responses=_documented(_ADDRESS), summary="A response that was kept")
    async def retrieve(response_id: str, request: Request) -> Response:
        _only(request, ("include",))
        return _json(store.get(response_id, "response_id").response)

    @router.delete("/v1/responses/{response_id}", responses=_documented(_ADDRESS), summary="Forget a response")
    async def delete(response_id: str) -> Response:
        store.drop(response_id, "response_id")
        return _json({"id": response_id, "object": "response", "deleted": True})

    @router.post(
        "/v1/responses/{response_id}/cancel",
        responses=_documented(_ADDRESS),
        summary="Refused: no response outlives its request",
    )
    async def cancel(response_id: str) -> Response:
        store.get(response_id, "response_id")
        raise InvalidRequest(
            "a response that is not in the background can not be cancelled",
            remedy="close the connection of its request, which ends it",
            param="response_id",
        )

    @router.get(
        "/v1/responses/{response_id}/input_items",
        responses=_documented(_ADDRESS),
        summary="The items of a response's own input",
    )
    async def items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
        after: str | None = None,
    ) -> Response:
        _only(request, ("include", "limit", "order", "after"))
        return _json(page_of(store.get(response_id, "response_id").items, limit, order, after))


class _Call:
    """One request: what it wants, and how its answer is written. Raises what refuses it."""

    def __init__(self, frontend: Frontend, store: ResponseStore, texts: TokenTexts, body: ResponsesRequest) -> None:
        self.frontend, self.store, self.body = frontend, store, body
        model = check_model(frontend, body.model)
        check_generates(frontend)
        self.earlier = _earlier(store, body.previous_response_id)
        self.turn = read_request(body, self.earlier, frontend.config.max_logprobs)
        self.writer = ResponseWriter(
            _draft(body, self.turn.request.params, model, fingerprint(frontend)),
            tokens=texts,
            count=lambda text: len(frontend.codec.encode(text, special=False)) if text else 0,
            top=self.turn.request.params.logprobs,
        )

    async def start(self) -> ChatRun:
        """Give the conversation to an engine."""
        with own_names(_OWN_NAMES):
            return await start_chat(self.frontend, self.turn.request)

    def headers(self, run: ChatRun) -> dict[str, str]:
        """The header about what of the request had no effect."""
        return warned(sorted({*self.turn.warnings, *unread(self.body, run.ignored)}))

    async def answer(self) -> Response:
        """The whole response; waits for its end."""
        async with await self.start() as run:
            async for event in run:
                self.writer.take(event)
            self._end(run)
        if self.writer.failure is not None:
            raise Unanswered(self.writer.failure)
        return _json(self.writer.response, self.headers(run))

    async def chunks(self, run: ChatRun) -> AsyncGenerator[bytes, None]:
        """The response's events as they happen. An error ends them with the event that tells it, but what comes before
        the first word is raised, so that it has a status of its own."""
        events = aiter(run)
        first = await anext(events)
        yield _sent([*self.writer.start(), *self.writer.take(first)])
        try:
            async for event in events:
                made = self.writer.take(event)
                if made:
                    yield _sent(made)
        except Exception as error:
            self.writer.failure = told(error)
        yield _sent(self._end(run))

    def _end(self, run: ChatRun) -> list[Event]:
        made = self.writer.end(run.generation.output)
        if self.body.store is not False:
            response = self.writer.response
            items = input_items(self.body.input or "")
            messages = [*self.earlier, *self.turn.new, self.writer.said()]
            self.store.put(Stored.of(response, items, messages))
        return made


def _earlier(store: ResponseStore, response_id: str | None) -> list[Any]:
    return list(store.get(response_id, "previous_response_id").messages) if response_id is not None else []


def _draft(body: ResponsesRequest, params: SamplingParams, model: str, mark: str) -> dict[str, Any]:
    """The response before its first word: what was asked, with what applies where nothing was said."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
    effort = body.reasoning.effort if body.reasoning is not None else None
    choice = body.tool_choice
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump() if choice is not None and not isinstance(choice, str) else choice or "auto",
        "tools": [_shown_tool(tool.model_dump(exclude_none=True)) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "system_fingerprint": mark,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **tool}


def _documented(errors: Iterable[int], *, streams: bool = False) -> dict[int | str, Any]:
    """The `responses` of an endpoint: an object, events too if it streams, and its errors."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = events_of()
    said = (
        "The response, or with `stream` its events, of which the last has the whole"
        if streams
        else "What was asked for"
    )
    return {200: {"description": said, "content": content}, **{status: ERRORS[status] for status in errors}}


def _sent(events: Iterable[Event]) -> bytes:
    return b"".join(b"event: " + event["type"].encode() + b"\ndata: " + encode(event) + b"\n\n" for event in events)


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), 200, headers, "application/json")


def _only(request: Request, known: Iterable[str]) -> None:
    """Refuse parameters that would have no effect."""
    unknown = next((name for name in request.query_params if name.removesuffix("[]") not in known), None)
    if unknown is not None:
        raise InvalidRequest(
            f"found the parameter {unknown[:60]!r}", wanted=f"none but {', '.join(known)}", param=unknown[:60]
        )
