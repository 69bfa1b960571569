"""Answers of all protocols: common shape, encoding, headers, and description in the OpenAPI
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
"""The header that names the parts of a request without effect."""
CUT = "x-sglcore-max-tokens"
"""The header with the token limit that the context set, if an answer may have had more."""
MOST_WARNED = 1000
"""Characters of names in that header."""

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
WITH_BODY = tuple(status for status in _SAID if status not in (405, 507))
"""Error statuses of an endpoint that takes a body."""

encode = msgspec.json.Encoder().encode
"""UTF-8 JSON of plain values."""


class Answer(BaseModel):
    """A part of an answer. Only what was set is sent."""

    model_config = ConfigDict(protected_namespaces=(), json_schema_serialization_defaults_required=False)

    def json_bytes(self) -> bytes:
        """UTF-8 JSON of the fields that were set."""
        return self.model_dump_json(exclude_unset=True).encode()


class ErrorDetail(Answer):
    """An error: `param` names the field of the request, `code` is for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Answer):
    """An error of the OpenAI endpoints."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How the parts of a stream are written."""

    media_type: str
    """The content-type header."""
    keep_alive: bytes
    """Bytes that readers skip, sent after a silent period for clients that give up on silent
    streams.
    """


EVENTS = StreamForm("text/event-stream; charset=utf-8", b": keep-alive\n\n")
"""Server-sent events. The keep-alive is a comment, which clients skip."""
LINES = "application/x-ndjson"
"""The content-type of streams with one JSON value per line."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer of events that are sent as they arrive. `held` is left when it has ended, for any
    reason.

    The status is sent with the first event. An error before it is an ordinary answer; an error
    after it is one more event, which `on_error` makes.
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
    """Return the answer as an HTTP response; a mapping must match the documented model.

    `warnings`: fields without effect; `outputs`: the outputs generated for it.
    """
    data = answer.json_bytes() if isinstance(answer, Answer) else encode(answer)
    return Response(data, 200, warned(warnings, outputs), "application/json")


def event(value: Any) -> bytes:
    """Return one server-sent event with a JSON value."""
    return b"data: " + encode(value) + b"\n\n"


def named_events(values: Iterable[Mapping[str, Any]]) -> bytes:
    """Return server-sent events with JSON values, each named by its `type`."""
    return b"".join(b"event: " + value["type"].encode() + b"\n" + event(value) for value in values)


def error_body(failure: Failure) -> dict[str, Any]:
    """Return a failure in OpenAI's form, which every endpoint uses if its protocol has no other
    form.
    """
    return {"error": {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}}


def cut_of(outputs: Sequence[RequestOutput]) -> int | None:
    """Return the smallest token limit that the context set below the requested number; None if it
    set none.
    """
    return min((output.max_tokens for output in outputs if output.max_tokens is not None), default=None)


def add_unknown(headers: MutableHeaders, names: Iterable[str]) -> None:
    """Add unknown fields to the warnings header, before the ignored fields."""
    ignored = headers.get(WARNINGS)
    headers[WARNINGS] = f"unknown: {shown(names)}" + (f"; {ignored}" if ignored else "")


def shown(names: Iterable[str]) -> str:
    """Return a client's names in a form that is safe for a header or a log."""
    found = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in names)
    return "".join(letter if letter.isprintable() else "?" for letter in found)[:MOST_WARNED]


def warned(names: Iterable[str], outputs: Sequence[RequestOutput] = ()) -> dict[str, str]:
    """Return the headers about ignored fields and about answers that the context limits; empty if
    there are none."""
    cut = cut_of(outputs)
    text = shown(names)
    ignored = {WARNINGS: f"ignored: {text}"} if text else {}
    return ignored if cut is None else {**ignored, CUT: str(cut)}


def warnings_of(sample: Completion) -> dict[str, Any]:
    """Return the field about parts of its schema that a sample violates; empty if there is nothing
    to report."""
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
    """Return the `responses` of an endpoint: its answer (without a model: JSON of this form), its
    stream if it has one, its errors.

    `events` names the schema of an event's data; empty: the events have several. `lines`: the
    stream has one object per line.
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
    """Return the part of `responses` for these statuses."""
    return {status: {"model": error, "description": _SAID[status]} for status in statuses}


def events_of(name: str) -> dict[str, Any]:
    """Return a stream for the document; `name` is the schema of an event's JSON data; empty: all
    kinds of data."""
    data: dict[str, Any] = {"type": "string"}
    if name:
        data |= {"contentMediaType": "application/json", "contentSchema": {"$ref": f"#/components/schemas/{name}"}}
    properties = {"data": data, "event": {"type": "string"}}
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": properties}}
