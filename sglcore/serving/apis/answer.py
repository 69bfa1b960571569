"""What answers of all protocols share: their shape, their bytes, their headers, and how the
document describes them."""

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
from sglcore.serving.replicas.errors import Failure

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
WARNINGS = "x-sglcore-warnings"
"""The header that tells what of a request had no effect."""
CUT = "x-sglcore-max-tokens"
"""The header that tells how many tokens the context holds of an answer that may have had more."""
MOST_WARNED = 1000
"""Characters of names in that header."""

_SAID = MappingProxyType(
    {
        400: "The request can not be run as it is; `param` names the field",
        401: "No key, or a wrong one",
        403: "A host name that this server does not answer for",
        404: "No such model or object",
        405: "Another method than the endpoint has",
        408: "The body did not come in time",
        413: "The body is larger than this server's limit",
        415: "A body that is not declared as JSON",
        429: "Too much to do; `Retry-After` says when to come again",
        500: "An error inside the server, with the id under which its log has it",
        503: "The model is not ready, or its engine ended",
        507: "The disk is full, so nothing was kept",
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
    """What went wrong: `param` is the request's field, `code` a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Answer):
    """Every error of the OpenAI endpoints."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How the parts of a stream are written."""

    media_type: str
    """Its header content-type."""
    keep_alive: bytes
    """Bytes that readers skip, sent after a silent period for clients that give up on silent
    streams.
    """


EVENTS = StreamForm("text/event-stream; charset=utf-8", b": keep-alive\n\n")
"""Server-sent events. The keep-alive is a comment, which clients skip."""
LINES = "application/x-ndjson"
"""The content-type of streams that have a JSON value in each line."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer made of events as they come. `held` is left when it has ended, however it ends.

    The status is sent with the first event: what is raised before it is an answer like any other,
    what is raised after it is one more event, which `on_error` gives.
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
    """One server-sent event with a JSON value."""
    return b"data: " + encode(value) + b"\n\n"


def named_events(values: Iterable[Mapping[str, Any]]) -> bytes:
    """Server-sent events with JSON values, each named by its `type`."""
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
    """A client's names as a header or a log may have them."""
    found = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in names)
    return "".join(letter if letter.isprintable() else "?" for letter in found)[:MOST_WARNED]


def warned(names: Iterable[str], outputs: Sequence[RequestOutput] = ()) -> dict[str, str]:
    """The headers about ignored fields and about answers that the context cuts, if there are
    any."""
    cut = cut_of(outputs)
    text = shown(names)
    ignored = {WARNINGS: f"ignored: {text}"} if text else {}
    return ignored if cut is None else {**ignored, CUT: str(cut)}


def warnings_of(sample: Completion) -> dict[str, Any]:
    """The field about what of its schema a sample does not keep to, if there is anything to say."""
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
    """The `responses` of an endpoint: its answer (no model: JSON of this form), its stream if it
    has one, its errors.

    `events` names the schema of an event's data; empty: the events have several. `lines`: the
    stream has an object in each line.
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
    """The part of `responses` that is about these statuses."""
    return {status: {"model": error, "description": _SAID[status]} for status in statuses}


def events_of(name: str) -> dict[str, Any]:
    """A stream in the document; `name` is the schema of an event's JSON data; empty: all kinds of
    data."""
    data: dict[str, Any] = {"type": "string"}
    if name:
        data |= {"contentMediaType": "application/json", "contentSchema": {"$ref": f"#/components/schemas/{name}"}}
    properties = {"data": data, "event": {"type": "string"}}
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": properties}}
