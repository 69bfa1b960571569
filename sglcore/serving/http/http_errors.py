"""Converts every error to an HTTP response, in the form (OpenAI's, Anthropic's or Ollama's) of the
request's path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from sglcore.serving.apis.answer import encode, error_body
from sglcore.serving.apis.anthropic import events as anthropic
from sglcore.serving.apis.anthropic.models import VERSION
from sglcore.serving.apis.ollama import events as ollama
from sglcore.serving.http.openapi import Application
from sglcore.serving.replicas.server_errors import INVALID, Failure, InvalidRequest, told

LONGEST_SHOWN = 60
"""Maximum characters of a wrong value that its error repeats."""
OLLAMA = "/api/"
"""Prefix of the paths of Ollama's API."""
_WANTED = MappingProxyType(
    {
        "missing": "a value",
        "string_type": "text",
        "string_too_short": "at least {min_length} characters",
        "string_too_long": "at most {max_length} characters",
        "string_pattern_mismatch": "text that matches {pattern}",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
        "int_type": "an integer",
        "int_parsing": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "finite_number": "a number",
        "greater_than": "more than {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than_equal": "at most {le}",
        "list_type": "a list",
        "too_short": "at least {min_length} of them",
        "too_long": "at most {max_length} of them",
        "dict_type": "an object",
        "model_type": "an object",
        "model_attributes_type": "an object",
        "none_required": "null",
        "literal_error": "{expected}",
    }
)
"""Our text for types of pydantic errors; pydantic's own text is for Python programmers."""


def body_of(failure: Failure, scope: Scope) -> dict[str, Any]:
    """Return a failure, as a value that is not encoded yet, in the form of the path's protocol:
    Ollama's, Anthropic's, or else OpenAI's. On /v1/models, which two protocols have, the request's
    headers decide."""
    path = scope["path"]
    if path.startswith(OLLAMA):
        return ollama.error_body(failure)
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    if path.startswith("/v1/models"):
        is_anthropic = VERSION in Headers(scope=scope)
    return anthropic.error_body(failure) if is_anthropic else error_body(failure)


def answer(found: Failure, scope: Scope) -> Response:
    """Return the JSON response of a failure, with its status and headers, in the form of the path's
    protocol."""
    return Response(encode(body_of(found, scope)), found.status, dict(found.headers), "application/json")


async def on_validation(request: Request, error: Exception) -> Response:
    """Answer a request with a wrong body or wrong parameters, with status 400; an exception handler
    of FastAPI for RequestValidationError."""
    assert isinstance(error, RequestValidationError)
    return answer(told(refused(error)), request.scope)


async def on_http(request: Request, error: Exception) -> Response:
    """Answer a request for which an HTTPException was raised, with its status: an unknown path or
    method, or a body that is not JSON; an exception handler of FastAPI."""
    assert isinstance(error, HTTPException)
    path, detail, headers = request.url.path, str(error.detail), dict(error.headers or {})
    if detail == HTTPStatus(error.status_code).phrase:
        detail = f"{request.method} {path[:200]}: {detail.lower()}; /openapi.json lists the endpoints"
    if error.status_code == 405 and isinstance(request.app, Application):
        # Several routes of one path may have one method each; the router names only those of the
        # first route.
        own = headers.pop("Allow", "").split(", ")
        headers["allow"] = ", ".join(request.app.methods(path) or sorted(own))
    code = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}.get(error.status_code)
    return answer(Failure(error.status_code, detail, INVALID, code=code, headers=headers), request.scope)


def refused(error: RequestValidationError) -> InvalidRequest:
    """Return (not raise) the error about the first wrong parameter of path or query; if there is
    none, about the most deeply nested error in the first wrong field of the body."""
    elsewhere = next((item for item in error.errors() if item["loc"][0] != "body"), None)
    if elsewhere is not None:
        return _refused_parameter(elsewhere)
    found = [(item, _real_names(item, error.body)) for item in error.errors()]
    top = found[0][1][:1]
    about = [place for place in found if place[1][:1] == top]
    # The deepest error in a union belongs to the member that fits the value's form.
    path = max((names for _, names in about), key=len)
    return _refusal(path, [item for item, names in about if names == path], error.body)


def _refused_parameter(item: Any) -> InvalidRequest:
    """Return the error of a wrong parameter in the path or the query. `item`: one error of
    pydantic's list."""
    name = str(item["loc"][-1])
    return InvalidRequest(f"{name}: found {_shown(item['input'])}", wanted=_wanted(item), param=name)


def _refusal(path: tuple[Any, ...], about: Sequence[Any], body: Any) -> InvalidRequest:
    param = _path(path) or None
    if about[0]["type"] == "missing":
        where = f"the field {param} is missing" if param else "the body is empty"
        return InvalidRequest(where, wanted="" if param else "a JSON object", param=param)
    wanted = " or ".join(dict.fromkeys(map(_wanted, about)))
    found = _value(body, path)
    return InvalidRequest(f"{param or 'the body'}: found {_shown(found)}", wanted=wanted, param=param)


def _wanted(item: Any) -> str:
    words = _WANTED.get(item["type"])
    if words is None:
        return item["msg"]
    given = {name: _as_json(value) for name, value in item.get("ctx", {}).items()}
    return words.format(**given)


def _as_json(value: Any) -> str:
    """Return a limit from the `ctx` of a pydantic error as text for a message: floats short,
    literals in double quotes, such as `"a", "b" or "c"`."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("'", '"').replace("False", "false")


def _real_names(item: Any, body: Any) -> tuple[Any, ...]:
    """Return the names and indices in an error's location that exist in the body, and the name of a
    missing field; pydantic adds others for the members of unions. `item`: one error of pydantic's
    list; `body`: plain values."""
    names: list[Any] = []
    loc = item["loc"][1:]
    for place, name in enumerate(loc, 1):
        if isinstance(body, dict) and isinstance(name, str) and name in body:
            body = body.get(name)
        elif isinstance(body, list) and isinstance(name, int) and name < len(body):
            body = body[name]
        elif isinstance(body, dict) and item["type"] == "missing" and place == len(loc):
            body = None
        else:
            continue
        names.append(name)
    return tuple(names)


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
    text = encode(value).decode()
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
