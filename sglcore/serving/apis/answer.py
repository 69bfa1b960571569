"""Answers of all protocols: base classes, encoding, headers, and their description in the OpenAPI
document."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import Response
from pydantic import BaseModel, ConfigDict
from starlette.datastructures import MutableHeaders

from sglcore.engine.outputs import Completion, RequestOutput
from sglcore.serving.replicas.server_errors import Failure

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
WARNINGS = "x-sglcore-warnings"
"""The response header that names unknown fields of the request, and fields without effect."""
CUT = "x-sglcore-max-tokens"
"""The response header with the token limit that the context set, if a larger one was requested."""
MOST_WARNED = 1000
"""Maximum characters of names in the header WARNINGS."""

_SAID = MappingProxyType(
    {
        400: "The request cannot be run as it is; `param` names the field",
        401: "No API key, or a wrong one",
        403: "A host name or a web origin that this server does not allow",
        404: "No such model or object",
        405: "The endpoint does not have this method",
        408: "The body did not arrive in time",
        413: "The body is larger than this server's limit",
        415: "A body that is not declared as JSON",
        429: "The server is overloaded; `Retry-After` says when to try again",
        500: "An error inside the server; the message has the id of its log entry",
        503: "The model is not ready, or its engine ended",
        507: "The disk is full, so nothing was stored",
    }
)
"""What each error status means, for the OpenAPI document."""
WITH_BODY = tuple(status for status in _SAID if status not in (405, 507))
"""Error statuses that the OpenAPI document lists for an endpoint with a request body."""

encode = msgspec.json.Encoder().encode
"""Returns a plain value as UTF-8 JSON."""


class Answer(BaseModel):
    """Base of the models of answers. Only fields that were set are sent."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_serialization_defaults_required=False)

    def json_bytes(self) -> bytes:
        """Return UTF-8 JSON of the fields that were set."""
        return self.model_dump_json(exclude_unset=True).encode()


class ErrorDetail(Answer):
    """An error: `param` names the field of the request, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Answer):
    """The body of an error response of the OpenAI endpoints."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a `Stream` is encoded: EVENTS for server-sent events, or another form of a protocol's
    own."""

    media_type: str
    """The content-type header."""
    keep_alive: bytes
    """Bytes that readers skip, sent after some time without an event, for clients that give up on
    silent streams."""


EVENTS = StreamForm("text/event-stream; charset=utf-8", b": keep-alive\n\n")
"""Server-sent events. The keep-alive is a comment, which clients skip."""
LINES = "application/x-ndjson"
"""The content-type of streams with one JSON value per line (Ollama's)."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer whose `events` (encoded) are sent as they arrive; a route returns it in place of a
    response. The context `held` is entered before the first event and left when the stream has
    ended for any reason.

    The status is sent with the first event. An error before that is an ordinary answer; an error
    after it is one more event, which `on_error` makes. `warnings` and `outputs`: as in `as_json`;
    `form`: how the events are encoded.
    """

    events: AsyncGenerator[bytes, None]
    held: AbstractAsyncContextManager[Any]
    on_error: Callable[[Exception], bytes]
    warnings: Iterable[str] = ()
    outputs: Sequence[RequestOutput] = ()
    form: StreamForm = EVENTS


def as_json(
    answer: Answer | Mapping[str, Any] | Sequence[Any],
    warnings: Iterable[str] = (),
    outputs: Sequence[RequestOutput] = (),
) -> Response:
    """Return the HTTP response with an answer and status 200. A mapping must match the model that
    the endpoint documents.

    `warnings`: names of request fields without effect; `outputs`: the outputs generated for the
    answer, for the header about their token limit.
    """
    data = answer.json_bytes() if isinstance(answer, Answer) else encode(answer)
    return Response(data, 200, warned(warnings, outputs), "application/json")


def event(value: Any) -> bytes:
    """Return one server-sent event with the JSON of a value as its data."""
    return b"data: " + encode(value) + b"\n\n"


def named_events(values: Iterable[Mapping[str, Any]]) -> bytes:
    """Return server-sent events with the JSON of each value as data, and the value's `type` as the
    event's name."""
    return b"".join(b"event: " + value["type"].encode() + b"\n" + event(value) for value in values)


def error_body(failure: Failure) -> dict[str, Any]:
    """Return the JSON value of a failure in OpenAI's form, which endpoints use unless their
    protocol has its own."""
    return {"error": {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}}


def cut_of(outputs: Sequence[RequestOutput]) -> int | None:
    """Return the smallest token limit that the context set for these outputs below the requested
    number; None if it set none."""
    return min((output.max_tokens for output in outputs if output.max_tokens is not None), default=None)


def add_unknown(headers: MutableHeaders, names: Iterable[str]) -> None:
    """Add unknown fields of the request to the header WARNINGS, before the ignored fields there."""
    ignored = headers.get(WARNINGS)
    headers[WARNINGS] = f"unknown: {shown(names)}" + (f"; {ignored}" if ignored else "")


def shown(names: Iterable[str]) -> str:
    """Return names that a client sent, joined and in a form that is safe for a header or a log."""
    found = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in names)
    return "".join(letter if letter.isprintable() else "?" for letter in found)[:MOST_WARNED]


def warned(names: Iterable[str], outputs: Sequence[RequestOutput] = ()) -> dict[str, str]:
    """Return the headers about request fields without effect and about outputs that the context
    limits; empty if there is nothing to report."""
    cut = cut_of(outputs)
    text = shown(names)
    ignored = {WARNINGS: f"ignored: {text}"} if text else {}
    return ignored if cut is None else {**ignored, CUT: str(cut)}


def warnings_of(sample: Completion) -> dict[str, Any]:
    """Return the answer's field about the parts of its schema that a sample violates; empty if
    there are none."""
    return {"warnings": sample.warnings} if sample.warnings else {}


def documented(
    model: type[Answer] | None = None,
    *,
    said: str = "",
    events: str | None = None,
    lines: bool = False,
    form: Any = "object",
    statuses: Iterable[int] = WITH_BODY,
    error: type[Answer] = ErrorAnswer,
) -> dict[int | str, Any]:
    """Return the `responses` of an endpoint for FastAPI: the answer (`model`; without one, JSON of
    type `form`), described by `said`, the stream if it has one, and the errors with these
    `statuses`.

    `events`: the stream's events have this schema as data; empty: several schemas; None: no stream.
    `lines`: it can stream one JSON object per line.
    """
    content = {} if model is not None else {"application/json": {"schema": {"type": form}}}
    if events is not None:
        content["text/event-stream"] = events_of(events)
    if lines:
        content[LINES] = {"itemSchema": {"type": "object"}}
    given = {"model": model, "description": said, "content": content}
    success = {name: value for name, value in given.items() if value}
    return {200: success, **documented_errors(statuses, error)}


def documented_errors(statuses: Iterable[int], error: type[Answer] = ErrorAnswer) -> dict[int | str, Any]:
    """Return the part of `responses` for these error statuses."""
    return {status: {"model": error, "description": _SAID[status]} for status in statuses}


def events_of(name: str) -> dict[str, Any]:
    """Return the description of a stream of server-sent events for the OpenAPI document. `name`:
    the schema of the events' data; empty: several schemas."""
    data: dict[str, Any] = {"type": "string"}
    if name:
        data |= {"contentMediaType": "application/json", "contentSchema": {"$ref": f"#/components/schemas/{name}"}}
    properties = {"data": data, "event": {"type": "string"}}
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": properties}}
