"""Checks that the endpoints of all protocols share: the model's name, readiness, limits,
unsupported fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from sglcore.sampling.params import SamplingError
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.server_errors import InvalidRequest, parameter_of

SHOWN = 60
"""Maximum characters of a caller's text that an error repeats."""


def check_model(frontend: Frontend, name: str | None) -> str:
    """Return the model name under which a request is answered: `name`, which must be a served name,
    or without a name the first served name. Raises InvalidRequest (404)."""
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
    """Raise NotReady, with the phase of the start, unless requests are accepted. While an engine
    restarts, requests are accepted and wait."""
    if not frontend.health.takes_requests:
        raise frontend.health.refusal()


def check_generates(frontend: Frontend) -> None:
    """Raise NotReady as `check_ready`, and InvalidRequest if the model only embeds or scores."""
    check_ready(frontend)
    if frontend.info is not None and not frontend.info.generates:
        scores = frontend.info.limits["num_labels"] > 0
        raise InvalidRequest(
            f"this model answers with {'scores' if scores else 'vectors'}, and generates no text",
            remedy=f"use {'/v1/score or /classify' if scores else '/v1/embeddings'}, or serve a language model",
            param="model",
            code="model_does_not_generate",
        )


def fingerprint(frontend: Frontend) -> str:
    """Return the fingerprint of the engine; empty before it has started.

    It changes with everything that may change a result: versions, device, model, start-up
    decisions.
    """
    return frontend.info.fingerprint if frontend.info is not None else ""


def check_limit(field: str, found: int | None, most: int, what: str = "") -> None:
    """Raise InvalidRequest if `found` (None: nothing to check) is more than this server's limit
    `most`. `what`: the name of the counted things, such as "prompts", if `found` is not the value
    of the field."""
    if found is not None and found > most:
        raise InvalidRequest(
            f"{field} has {found} {what}" if what else f"{field} is {found}",
            wanted=f"at most {most}",
            remedy=f"lower {field}, or raise the limit where the server is started",
            param=field,
            code="limit_exceeded",
        )


def refuse_kind(what: str, kind: str, wanted: str, param: str) -> NoReturn:
    """Raise InvalidRequest for an item (`what`, such as "a tool") whose type `kind` is not accepted
    at the field `param`; `wanted`: the accepted types."""
    raise InvalidRequest(
        f"{param}: found {what} of type {kind[:SHOWN]!r}, which this server does not take here",
        wanted=wanted,
        remedy="leave it out",
        param=param,
        code="unsupported_value",
    )


def refuse_fields(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise InvalidRequest about the first name in `reasons` that `body` sets to a value other than
    None, false, 0, `""`, `[]` or `{}`, with the reason why it is not supported."""
    for name, reason in reasons.items():
        if body.get(name) not in (None, False, "", [], {}):
            raise InvalidRequest(f"{name}: {reason}", remedy="leave it out", param=name, code="unsupported_parameter")


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in InvalidRequest and SamplingError raised inside the context to the protocol's
    names; SamplingError becomes InvalidRequest.

    `names`: names of the chat endpoint and of sampling parameters -> names of the protocol.
    """
    try:
        yield
    except InvalidRequest as error:
        error.param = names.get(error.param or "", error.param)
        raise
    except SamplingError as error:
        ours = parameter_of(error)
        if ours is None:
            raise
        found, mark, rest = _split(str(error))
        own = names.get(ours, ours)
        text = own + found.removeprefix(ours) + mark + re.sub(r"\w+", lambda word: names.get(word[0], word[0]), rest)
        raise InvalidRequest(text, param=own) from None


def _split(text: str) -> tuple[str, str, str]:
    """Return what an error found, the mark after it, and what was wanted or the remedy; the last
    two are empty if it says neither."""
    mark = next((each for each in (", wanted ", "; ") if each in text), "")
    return text.rpartition(mark) if mark else (text, "", "")
