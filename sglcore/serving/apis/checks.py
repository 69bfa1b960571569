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
    """Return the model name under which a request is answered: `name`, or the first served name if
    `name` is None or empty. Raises InvalidRequest (status 404) if `name` is no served name."""
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
    """Raise NotReady unless requests are accepted, and InvalidRequest if the model generates no
    text, but embeds or scores."""
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
    """Return the fingerprint of an engine that has been ready; empty before the first one has.

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
    """Always raise InvalidRequest, for an item (`what`, such as "a tool") of the type `kind`, which
    the field `param` does not accept; `wanted`: text that names the accepted types."""
    raise InvalidRequest(
        f"{param}: found {what} of type {kind[:SHOWN]!r}, which this server does not take here",
        wanted=wanted,
        remedy="leave it out",
        param=param,
        code="unsupported_value",
    )


def refuse_fields(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise InvalidRequest about the first field in `reasons` (name -> why it is not supported)
    that `body` sets to a value other than None, false, 0, `""`, `[]` or `{}`."""
    for name, reason in reasons.items():
        if body.get(name) not in (None, False, "", [], {}):
            raise InvalidRequest(f"{name}: {reason}", remedy="leave it out", param=name, code="unsupported_parameter")


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors that are raised inside the context to the protocol's names: an
    InvalidRequest gets another `param` and keeps its text; a SamplingError becomes an
    InvalidRequest, with the names in its text replaced too. A SamplingError that does not begin
    with a parameter's name passes unchanged.

    `names`: names of the chat endpoint and of sampling parameters -> names of the protocol; other
    names stay.
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
    """Split the text of an error into what it found, the mark after that (`, wanted ` or `; `), and
    the rest: what was wanted, or the remedy. Without a mark, the last two are empty."""
    mark = next((each for each in (", wanted ", "; ") if each in text), "")
    return text.rpartition(mark) if mark else (text, "", "")
