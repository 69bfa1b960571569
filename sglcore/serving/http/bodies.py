"""Reading request bodies: strict JSON, and errors that name the field, what was found and what was wanted."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from sglcore.serving.apis.body import UNKNOWN_FIELD
from sglcore.serving.replicas.errors import InvalidRequest

LONGEST_SHOWN = 60
"""Characters of a refused value that its error repeats."""
LARGE = 256 << 10
"""Bytes of a body from which it is read beside the event loop."""
MOST_DEPTH = 256
"""Levels of a body. Whatever goes through it level by level, as encoders do, has to have the stack for it."""
_TOO_DEEP = object()
_PREFIX = "Input should be "


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


def refused(error: RequestValidationError) -> InvalidRequest:
    """What is wrong with a body or a parameter, about the first field that is wrong."""
    elsewhere = next((item for item in error.errors() if item["loc"][0] != "body"), None)
    if elsewhere is not None:
        return _refused_parameter(elsewhere)
    found = [(item, _real_names(item["loc"][1:], error.body)) for item in error.errors()]
    unknown = next((place for place in found if place[0]["type"] == UNKNOWN_FIELD), None)
    if unknown is not None:
        return _unknown(*unknown)
    top = found[0][1][:1]
    about = [place for place in found if place[1][:1] == top]
    # The deepest error of a union's members belongs to the member whose form the value has.
    path = max((names for _, names in about), key=len)
    return _refusal(path, [item for item, names in about if names == path], error.body)


def _unknown(item: Any, names: tuple[Any, ...]) -> InvalidRequest:
    field = repr(item["ctx"]["field"])[1:-1][:LONGEST_SHOWN]
    where = f" in {_path(names)}" if names else ""
    near = difflib.get_close_matches(item["ctx"]["field"], item["ctx"]["known"], n=1)
    hint = f"did you mean {near[0]!r}?" if near else "leave it out"
    return InvalidRequest(f"found the unknown field {field}{where}", remedy=hint, param=_path((*names, field)))


def _refused_parameter(item: Any) -> InvalidRequest:
    """What is wrong with a part of the address."""
    name = str(item["loc"][-1])
    return InvalidRequest(f"{name}: found {_shown(item['input'])}", wanted=_wanted(item["msg"]), param=name)


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


def _refusal(path: tuple[Any, ...], about: Sequence[Any], body: Any) -> InvalidRequest:
    param = _path(path) or None
    if about[0]["type"] == "missing":
        where = f"the field {param} is missing" if param else "the body is empty"
        return InvalidRequest(where, wanted="" if param else "a JSON object", param=param)
    wanted = " or ".join(dict.fromkeys(_wanted(item["msg"]) for item in about))
    found = _value(body, path)
    return InvalidRequest(f"{param or 'the body'}: found {_shown(found)}", wanted=wanted, param=param)


def _wanted(message: str) -> str:
    text = message.removeprefix("Value error, ")
    text = text.removeprefix(_PREFIX)
    return "an object" if text.startswith("a valid dictionary") else text


def _real_names(loc: Iterable[Any], body: Any) -> tuple[Any, ...]:
    """The part of an error's place that names fields of the body: unions add names of their own to it."""
    names: list[Any] = []
    for name in loc:
        if isinstance(body, dict) and isinstance(name, str) and (name in body or not names):
            body = body.get(name)
        elif isinstance(body, list) and isinstance(name, int) and name < len(body):
            body = body[name]
        elif isinstance(body, dict) and _is_field(name):
            body = None
        else:
            continue
        names.append(name)
    return tuple(names)


def _is_field(name: Any) -> bool:
    """A missing field has a plain name; a member of a union may have brackets, or that of a class."""
    return isinstance(name, str) and name.isidentifier() and name == name.lower() and name not in ("str", "list", "int")


def _value(body: Any, path: Iterable[Any]) -> Any:
    for name in path:
        try:
            body = body[name]
        except (KeyError, IndexError, TypeError):
            return None
    return body


def _path(names: Iterable[Any]) -> str:
    text = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    return text.removeprefix(".")[:200]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
