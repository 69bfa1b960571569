"""From a request to its endpoint and back: strict JSON in, answers and streams out, all of which ends when the client goes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from sglcore.serving.apis.answer import Stream
from sglcore.serving.http.errors import LONGEST_SHOWN
from sglcore.serving.http.sse import EventStream, while_connected
from sglcore.serving.replicas.errors import InvalidRequest

LARGE = 256 << 10
"""Bytes of a body from which it is read beside the event loop."""
MOST_DEPTH = 256
"""Levels of a body. Whatever goes through it level by level, as encoders do, has to have the stack for it."""
_TOO_DEEP = object()


class JsonRequest(Request):
    """A request whose JSON is read strictly: UTF-8, no NaN, no lone surrogates, bounded nesting."""

    def __init__(self, scope: Scope, receive: Receive, model: Any = None) -> None:
        """`model`: what the body is to become, a subclass of pydantic's BaseModel; None: nothing is known of it."""
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> Any:
        """The decoded body, of a large one the model itself, made beside the event loop. Raises HTTPException 400 if it
        is not JSON."""
        data = await self.body()
        return await asyncio.to_thread(_modelled, data, self._model) if len(data) > LARGE else _decoded(data)


class JsonRoute(APIRoute):
    """A route that reads JSON bodies strictly and no others."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a strict request; a body that is declared as something else is refused."""
        handle = super().get_route_handler()
        wants_body = self.body_field is not None
        model = self.body_field.field_info.annotation if self.body_field is not None else None

        async def read(request: Request) -> Response:
            if wants_body:
                _check_type(request.headers.get("content-type", ""))
            return await handle(JsonRequest(request.scope, request.receive, model))

        return read


class Routes(APIRouter):
    """Endpoints that give a Response or a Stream, and know nothing of the connection."""

    def __init__(self, keep_alive: float = 15.0) -> None:
        """`keep_alive`: seconds after which a stream that has nothing to say says that it lives."""
        super().__init__(route_class=JsonRoute)
        self._keep_alive = keep_alive

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **given: Any) -> None:
        """As ever, for an endpoint that is cancelled when its client goes."""
        super().add_api_route(path, _connected(endpoint, self._keep_alive), **{**given, "response_model": None})


def _connected(
    endpoint: Callable[..., Coroutine[Any, Any, Response | Stream]], keep_alive: float
) -> Callable[..., Any]:
    """The endpoint as FastAPI calls it, by the parameters of its signature: with the request, whose client may go."""

    by_name = inspect.Parameter.KEYWORD_ONLY
    wanted = inspect.signature(endpoint).parameters
    own = inspect.Parameter("request", by_name, annotation=Request)

    @wraps(endpoint)
    async def answer(*, request: Request, **given: Any) -> Response:
        more = {"request": request} if "request" in wanted else {}
        found = await while_connected(request, endpoint(**given, **more))
        return EventStream(found, keep_alive) if isinstance(found, Stream) else found

    parameters = [each.replace(kind=by_name) for each in {**wanted, "request": own}.values()]
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


def _modelled(data: bytes, model: Any) -> Any:
    """The model of a body; the plain values if it is wrong, which whoever reads them next finds at its first error."""
    found = _decoded(data)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return found
    try:
        return model.model_validate(found)
    except ValidationError:
        return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        parts = (part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list))
        level = [each for part in parts for each in part if isinstance(each, dict | list)]
        if not level:
            return False
    return True


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
