"""POST /v1/responses and /v1/responses/input_tokens, and the stored responses: GET and DELETE
/v1/responses/{id}, GET /v1/responses/{id}/input_items (OpenAI's API)."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.answer import WITH_BODY, Stream, as_json, documented
from sglcore.serving.apis.checks import check_model, own_names
from sglcore.serving.apis.request_params import completed
from sglcore.serving.apis.responses.body import CountRequest, ResponsesRequest
from sglcore.serving.apis.responses.events import ResponseWriter
from sglcore.serving.apis.responses.items import page_of
from sglcore.serving.apis.responses.request import chat_request, response_request, unread, unused
from sglcore.serving.apis.responses.response_store import ResponseStore
from sglcore.serving.apis.token_text import TokenTexts
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.run import count_prompt, start_chat
from sglcore.serving.replicas.server_errors import InvalidRequest

_OWN_NAMES = MappingProxyType(
    {
        "messages": "input",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }
)
"""Names of the chat endpoint and of sampling parameters -> names of this endpoint."""
_ADDRESS = (400, 404)
"""Error statuses of an endpoint whose only input is an id."""


def add_routes(router: APIRouter, frontend: ChatFrontend) -> None:
    """Add all endpoints to the router. Responses are stored in the memory of this process, at most
    `max_stored_responses`. Only the first endpoint needs a model; counting needs the tokenizer."""
    store = ResponseStore(frontend.config.max_stored_responses)
    texts = TokenTexts(frontend.codec)

    @router.post(
        "/v1/responses",
        tags=["responses"],
        responses=_documented("The response; with `stream`, its events, the last with the whole response", events=""),
    )
    async def create(body: ResponsesRequest) -> Response | Stream:
        """Answer a conversation made of items."""
        writer = ResponseWriter(frontend, texts, body, store)
        earlier = _earlier(store, body.previous_response_id)
        with own_names(_OWN_NAMES):
            request = response_request(completed(body, frontend.sampling), earlier, frontend.config.max_logprobs)
            run = await start_chat(frontend, request)
        return await writer.respond(run, body.stream, sorted({*unused(body), *unread(body, run.ignored)}))

    @router.post("/v1/responses/input_tokens", tags=["responses"], responses=_documented())
    async def count(body: CountRequest) -> Response:
        """Count the prompt tokens of an input, without running the model."""
        check_model(frontend, body.model)
        earlier = _earlier(store, body.previous_response_id)
        chat = chat_request(body, earlier, SamplingParams())
        found = {"object": "response.input_tokens", "input_tokens": await count_prompt(frontend, chat, "input")}
        return as_json(found, body.warnings())

    _add_kept(router, store)


def _add_kept(router: APIRouter, store: ResponseStore) -> None:
    """Add the endpoints that return, delete, cancel and list the input of responses, which are in
    `store`."""

    @router.get("/v1/responses/{response_id}", tags=["responses"], responses=_documented(statuses=_ADDRESS))
    async def retrieve(response_id: str, request: Request) -> Response:
        """Return a stored response."""
        _only(request, ("include",))
        return as_json(store.get(response_id, "response_id").response)

    @router.delete("/v1/responses/{response_id}", tags=["responses"], responses=_documented(statuses=_ADDRESS))
    async def delete(response_id: str) -> Response:
        """Delete a stored response."""
        store.drop(response_id, "response_id")
        return as_json({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel", tags=["responses"], responses=_documented(statuses=_ADDRESS))
    async def cancel(response_id: str) -> Response:
        """Cancel a response: always refused, because no response continues after its request."""
        store.get(response_id, "response_id")
        raise InvalidRequest(
            "a response that is not in the background cannot be cancelled",
            remedy="close the connection of its request, which ends it",
            param="response_id",
        )

    @router.get("/v1/responses/{response_id}/input_items", tags=["responses"], responses=_documented(statuses=_ADDRESS))
    async def items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
        after: str | None = None,
    ) -> Response:
        """List the items of a response's own input, without earlier responses."""
        _only(request, ("include", "limit", "order", "after"))
        return as_json(page_of(store.get(response_id, "response_id").items, limit, order, after))


def _earlier(store: ResponseStore, response_id: str | None) -> list[Any]:
    return list(store.get(response_id, "previous_response_id").messages) if response_id is not None else []


def _documented(
    said: str = "The requested object", events: str | None = None, statuses: Iterable[int] = WITH_BODY
) -> dict[int | str, Any]:
    return documented(said=said, events=events, statuses=statuses)


def _only(request: Request, known: Iterable[str]) -> None:
    """Raise InvalidRequest for a query parameter that is not in `known`: it would have no effect.
    Names that end in `[]` count without that."""
    unknown = next((name for name in request.query_params if name.removesuffix("[]") not in known), None)
    if unknown is not None:
        raise InvalidRequest(
            f"found the parameter {unknown[:60]!r}", wanted=f"none but {', '.join(known)}", param=unknown[:60]
        )
