"""What the endpoints have in common: the model's name, readiness, headers, and the documented errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import Response

from sglcore.engine.outputs import Completion, PromptProgress
from sglcore.serving.apis.body import Answer, ErrorAnswer
from sglcore.serving.http.sse import encode
from sglcore.serving.replicas.errors import InvalidRequest, NotReady
from sglcore.serving.replicas.frontend import Frontend
from sglcore.serving.replicas.runs import sample_failure

WARNINGS = "x-sglcore-warnings"
"""The header that tells what of a request had no effect."""
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
    }
)
ERRORS: Mapping[int, Any] = MappingProxyType(
    {status: {"model": ErrorAnswer, "description": text} for status, text in _SAID.items()}
)
"""The documented answer of every error status."""


def documented(model: type[Answer], *, stream: type[Answer] | None = None) -> dict[int | str, Any]:
    """The `responses` of an endpoint that takes a body: its answer, its stream of chunks if it has one, its errors."""
    success: dict[str, Any] = {"model": model}
    if stream is not None:
        success["content"] = {"text/event-stream": events_of(stream.__name__)}
        success["description"] = f"The answer, or with `stream` events of {stream.__name__} that end with [DONE]"
    return {200: success, **{status: ERRORS[status] for status in sorted(ERRORS) if status != 405}}


def events_of(name: str | None = None) -> dict[str, Any]:
    """A stream in the document; `name` is the schema of an event's JSON data, if all events have one."""
    data: dict[str, Any] = {"type": "string"}
    if name is not None:
        data |= {"contentMediaType": "application/json", "contentSchema": {"$ref": f"#/components/schemas/{name}"}}
    properties = {"data": data, "event": {"type": "string"}}
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": properties}}


def check_model(frontend: Frontend, name: str | None) -> str:
    """The name under which a request is answered: no name means the main one. Raises InvalidRequest (404)."""
    if not name:
        return frontend.names[0]
    if name not in frontend.names:
        raise InvalidRequest(
            f"the model {name[:120]!r} is not served here",
            wanted=f"one of {', '.join(frontend.names)}",
            param="model",
            code="model_not_found",
            status=404,
        )
    return name


def check_ready(frontend: Frontend) -> None:
    """Raise NotReady, with the phase, unless requests may come."""
    if not frontend.health.ready:
        raise NotReady(frontend.health.phase)


def check_generates(frontend: Frontend) -> None:
    """Raise NotReady, or InvalidRequest if the model only embeds or scores."""
    check_ready(frontend)
    if frontend.info is not None and not frontend.info.generates:
        scores = frontend.info.limits["num_labels"] > 0
        raise InvalidRequest(
            f"this model answers with {'scores' if scores else 'vectors'}, and generates no text",
            remedy=f"use {'LLM.score' if scores else '/v1/embeddings'}, or serve a language model",
            param="model",
            code="model_does_not_generate",
        )


def fingerprint(frontend: Frontend) -> str:
    """What may change a number changes this: versions, device, model, decisions."""
    return frontend.info.fingerprint if frontend.info is not None else ""


def warned(names: Iterable[str]) -> dict[str, str]:
    """The header about ignored fields; none if there are none."""
    found = ", ".join(name.encode("ascii", "backslashreplace").decode() for name in names)
    printable = "".join(letter if letter.isprintable() else "?" for letter in found)
    return {WARNINGS: f"ignored: {printable[:MOST_WARNED]}"} if printable else {}


def as_json(answer: Answer | Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """The answer as it is sent; a mapping must be what the documented model says."""
    data = answer.json_bytes() if isinstance(answer, Answer) else encode(answer)
    return Response(data, 200, dict(headers or {}), "application/json")


def ending(sample: Completion, reason: str | None) -> dict[str, Any]:
    """How a sample ended: the reason, what stopped it, the seed that gives it again, and why it failed if it did."""
    found: dict[str, Any] = {"finish_reason": reason, "stop_reason": sample.stop_cause, "seed_used": sample.seed}
    failed = sample_failure(sample.finish_reason, sample.error)
    return found if failed is None else {**found, **failed.openai()}


def progress(item: PromptProgress) -> dict[str, int]:
    """How far a prompt is, as a chunk tells it."""
    return {"total": item.total, "cached": item.cached, "processed": item.processed}


def frame(frontend: Frontend, kind: str, id: str, created: int, model: str) -> dict[str, Any]:
    """What an answer of OpenAI's, and every part of its stream, begins with; `created` in unix seconds."""
    return {"id": id, "object": kind, "created": created, "model": model, "system_fingerprint": fingerprint(frontend)}
