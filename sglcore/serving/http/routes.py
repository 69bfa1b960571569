"""Between a request and its endpoint: JSON is parsed strictly, and `Stream`s become responses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from sglcore.serving.apis.answer import Stream, add_unknown
from sglcore.serving.apis.request_params import SamplingFields
from sglcore.serving.apis.shared_body import Body
from sglcore.serving.apis.unknown import UnknownFields, refuse_foreign
from sglcore.serving.http.http_errors import LONGEST_SHOWN, OLLAMA
from sglcore.serving.http.sse import EventStream
from sglcore.serving.replicas.server_errors import InvalidRequest

LARGE = 256 << 10
"""A body with more bytes is parsed in a thread, outside the event loop."""
MOST_DEPTH = 256
"""Maximum depth of nesting in a body. Code that recurses through it, such as encoders, needs stack
for it."""
JSON, FORM = b"application/json", b"application/x-www-form-urlencoded"
"""Content types of JSON and of forms; curl sends the second one with any body, as in the examples
of Ollama's documentation."""
_TOO_DEEP = object()

Work = Coroutine[Any, Any, Response | Stream]
OnUnknown = Callable[[Request, Sequence[str]], None]
"""Gets a request and the paths of its unknown fields; may raise an error that refuses the
request."""


class JsonRequest(Request):
    """A request with a JSON body that is parsed strictly: UTF-8, no NaN, no lone surrogates,
    limited depth. `read` parses it; until then `json` returns None."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.unknown = UnknownFields()
        """Fields of the body that its model does not know, after the body has been read."""
        self.decoded: Any = None
        """The body as plain values."""
        self._read: Any = None

    async def read(self, model: type[BaseModel]) -> None:
        """Parse the body as a `model`, for `json`; an empty body becomes None. A large body is
        parsed in a thread, outside the event loop. Unknown fields are collected in `unknown`, not
        refused.

        Raises HTTPException 400 if it is not JSON, RequestValidationError if it does not fit the
        model, and InvalidRequest as `refuse_foreign`.
        """
        data = await self.body()
        if len(data) > LARGE:
            await asyncio.to_thread(self._take, data, model)
        elif data:
            self._take(data, model)

    async def json(self) -> Any:
        """Return what `read` parsed: an instance of the model, or None. Does not wait. Overrides
        Starlette's method."""
        return self._read

    def _take(self, data: bytes, model: type[BaseModel]) -> None:
        self.decoded = _decoded(data)
        if issubclass(model, Body):
            generates = issubclass(model, SamplingFields) or bool(model.sampled)
            refuse_foreign(self.decoded, model.known, generates=generates)
            parts = self.decoded if isinstance(self.decoded, dict) else {}
            for name, part in model.sampled.items():
                refuse_foreign(parts.get(name), part.known, generates=True)
        try:
            self._read = model.model_validate(self.decoded, context=self.unknown)
        except ValidationError as error:
            found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            raise RequestValidationError(found, body=self.decoded) from None


class JsonRoute(APIRoute):
    """The route of an endpoint. A body is parsed strictly, as a `JsonRequest`; one with another
    content type than JSON is refused (415)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request. If the endpoint has a body model, the handler parses
        the body first, and refuses (415) a content type other than JSON (on Ollama's paths also
        that of forms); without a content type, the body is read as JSON. Overrides FastAPI's
        method."""
        handle = super().get_route_handler()
        model: Any = self.body_field.field_info.annotation if self.body_field is not None else None
        takes_forms = self.path.startswith(OLLAMA) and model is not None

        async def read(given: Request) -> Response:
            request = JsonRequest(_as_json(given.scope) if takes_forms else given.scope, given.receive)
            if model is not None:
                _check_type(request.headers.get("content-type", ""))
                await request.read(model)
            return await handle(request)

        return read


class Routes(APIRouter):
    """A router whose endpoints return a Response or a Stream, without access to the connection."""

    def __init__(self, keep_alive: float = 15.0, on_unknown: OnUnknown | None = None) -> None:
        """`keep_alive`: seconds without an event after which a stream sends a keep-alive.

        `on_unknown` gets each request with unknown fields and their paths, before its endpoint
        runs; it may raise an error, which refuses the request. None: unknown fields are only
        reported in a header.
        """
        self._on_unknown = on_unknown
        super().__init__(route_class=JsonRoute)
        self.keep_alive = keep_alive

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **given: Any) -> None:
        """Add an endpoint that may return a Stream; `given`: FastAPI's parameters. The endpoint's
        docstring, which must be one line, becomes its summary in the OpenAPI document, unless
        `given` has one. Overrides FastAPI's method."""
        summary = given.get("summary") or (endpoint.__doc__ or "").rstrip(".")
        super().add_api_route(path, _streaming(endpoint, self), **{**given, "response_model": None, "summary": summary})

    def unknown_fields(self, request: Request) -> list[str]:
        """Return the paths of the request's unknown fields, such as `messages[0].mood`, after
        calling `on_unknown` if there are any. Raises what `on_unknown` raises."""
        found = request.unknown.places(request.decoded) if isinstance(request, JsonRequest) else []
        if found and self._on_unknown is not None:
            self._on_unknown(request, found)
        return found


def _streaming(endpoint: Callable[..., Work], routes: Routes) -> Callable[..., Any]:
    """Return the endpoint in FastAPI's form: it gets the parameters in its signature, and the
    request if it names it, and returns a response, for a `Stream` an `EventStream`. The response
    has a header with the request's unknown fields."""

    by_name = inspect.Parameter.KEYWORD_ONLY
    wanted = inspect.signature(endpoint).parameters
    own = inspect.Parameter("request", by_name, annotation=Request)

    @wraps(endpoint)
    async def answer(*, request: Request, **given: Any) -> Response:
        unknown = routes.unknown_fields(request)
        found = await endpoint(**given, **({"request": request} if "request" in wanted else {}))
        response = EventStream(found, routes.keep_alive) if isinstance(found, Stream) else found
        if unknown:
            add_unknown(response.headers, unknown)
        return response

    parameters = [each.replace(kind=by_name) for each in {**wanted, "request": own}.values()]
    answer.__doc__ = None  # FastAPI would show it as a description
    answer.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return answer


def _decoded(data: bytes) -> Any:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}; wanted UTF-8 JSON without NaN") from None
    except RecursionError:
        found = _TOO_DEEP
    if found is _TOO_DEEP or _is_deep(found):
        raise HTTPException(400, f"the body nests too deep; wanted at most {MOST_DEPTH} levels")
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [each for part in parts for each in part if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _as_json(scope: Scope) -> Scope:
    """Return a copy of `scope` in which the content type application/x-www-form-urlencoded, curl's
    default, is application/json. Other content types stay."""
    headers = [(name, JSON if (name, value) == (b"content-type", FORM) else value) for name, value in scope["headers"]]
    return {**scope, "headers": headers}


def _check_type(declared: str) -> None:
    kind = declared.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest(
            f"found a body of type {kind[:LONGEST_SHOWN]!r}",
            wanted="application/json",
            remedy="send the header Content-Type: application/json",
            code="unsupported_media_type",
            status=415,
        )
