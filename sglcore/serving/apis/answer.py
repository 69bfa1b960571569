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
    """An error: `message` is for people, `type` is the class of errors in OpenAI's words, such as
    "invalid_request_error", `code` is for programs (None: none), and `param` names the field of
    the request at fault (None: no single field)."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Answer):
    """The body of an error response of the OpenAI endpoints."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class StreamForm:
    """The content type of a `Stream`, and the bytes that keep a silent one alive: EVENTS for
    server-sent events, or another form of a protocol's own. The events themselves are encoded
    already."""

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

    Status 200 and the headers are sent with the first event or keep-alive. An exception of `events`
    before that becomes an ordinary error response; a later one becomes the last event, which
    `on_error` encodes. `warnings` (names of request fields without effect) and `outputs` (for the
    header about their token limit) are read for the headers, before the first event. `form`: the
    content type and the keep-alive.
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
    """Return the HTTP response with an answer as JSON and status 200. A mapping must match the
    model that the endpoint documents; this is not checked.

    `warnings`: names of request fields without effect, for the header WARNINGS; `outputs`: the
    outputs generated for the answer, for the header CUT about their token limit. Headers with
    nothing to report are left out.
    """
    data = answer.json_bytes() if isinstance(answer, Answer) else encode(answer)
    return Response(data, 200, warned(warnings, outputs), "application/json")


def event(value: Any) -> bytes:
    """Return one server-sent event with the JSON of a value as its data."""
    return b"data: " + encode(value) + b"\n\n"


def named_events(values: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the bytes of one server-sent event for each value, joined: the JSON of the value as
    data, and its key `type`, which it must have, as the event's name."""
    return b"".join(b"event: " + value["type"].encode() + b"\n" + event(value) for value in values)


def error_body(failure: Failure) -> dict[str, Any]:
    """Return a failure in OpenAI's form, `{"error": {message, type, param, code}}`, as a value that
    is not encoded yet. Endpoints use it unless their protocol has its own."""
    return {"error": {"message": failure.message, "type": failure.type, "param": failure.param, "code": failure.code}}


def cut_of(outputs: Sequence[RequestOutput]) -> int | None:
    """Return the smallest `max_tokens` of these outputs: the number of tokens for which the context
    has room, where more were requested. None if no output is limited in this way."""
    return min((output.max_tokens for output in outputs if output.max_tokens is not None), default=None)


def add_unknown(headers: MutableHeaders, names: Iterable[str]) -> None:
    """Write the names of the request's unknown fields into the header WARNINGS of `headers`, before
    the ignored fields that it may name already: `unknown: a, b; ignored: c`."""
    ignored = headers.get(WARNINGS)
    headers[WARNINGS] = f"unknown: {shown(names)}" + (f"; {ignored}" if ignored else "")


def shown(names: Iterable[str]) -> str:
    """Return names that a client sent, joined by ", " and cut to MOST_WARNED characters, in a form
    that is safe for a header or a log: printable ASCII, other letters as escapes. No names: ""."""
    found = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in names)
    return "".join(letter if letter.isprintable() else "?" for letter in found)[:MOST_WARNED]


def warned(names: Iterable[str], outputs: Sequence[RequestOutput] = ()) -> dict[str, str]:
    """Return the response headers WARNINGS, about the request fields `names`, which have no effect,
    and CUT, about `outputs` that the context limits. A header with nothing to report is absent."""
    cut = cut_of(outputs)
    text = shown(names)
    ignored = {WARNINGS: f"ignored: {text}"} if text else {}
    return ignored if cut is None else {**ignored, CUT: str(cut)}


def warnings_of(sample: Completion) -> dict[str, Any]:
    """Return the answer's field about a sample's schema, `{"warnings": [...]}`: the parts that are
    not enforced and that the sample violates, or why that is unknown. Empty if there are none."""
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
    `statuses`, each with a body of the model `error`. It is only documentation: nothing is checked.

    `events`: name of the schema of the stream's events; empty: several schemas; None: no stream of
    events. `lines`: it can stream one JSON object per line.
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
    """Return the part of an endpoint's `responses` for these error statuses: status -> the model
    `error` of the body, and a description. Raises KeyError for a status without a description."""
    return {status: {"model": error, "description": _SAID[status]} for status in statuses}


def events_of(name: str) -> dict[str, Any]:
    """Return the description of a stream of server-sent events for the OpenAPI document. `name`:
    the schema of each event's data, which must be among the document's schemas; empty: several
    schemas, and only "a string" is said."""
    data: dict[str, Any] = {"type": "string"}
    if name:
        data |= {"contentMediaType": "application/json", "contentSchema": {"$ref": f"#/components/schemas/{name}"}}
    properties = {"data": data, "event": {"type": "string"}}
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": properties}}
