"""The checks that endpoints of all protocols share: the model's name, readiness, limits,
unsupported fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from sglcore.sampling.params import SamplingError
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.server_errors import InvalidRequest, parameter_of

SHOWN = 60
"""Characters of a caller's text that an error repeats."""


def check_model(frontend: Frontend, name: str | None) -> str:
    """Return the name under which a request is answered; without a name, the main one. Raises
    InvalidRequest (404)."""
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
    """Raise NotReady, with the phase, unless requests are accepted. Requests during an engine's
    restart wait."""
    if not frontend.health.takes_requests:
        raise frontend.health.refusal()


def check_generates(frontend: Frontend) -> None:
    """Raise NotReady, or InvalidRequest if the model only embeds or scores."""
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
    """Return the fingerprint of the engine.

    All that may change a result changes it: versions, device, model, decisions.
    """
    return frontend.info.fingerprint if frontend.info is not None else ""


def check_limit(field: str, found: int | None, most: int, what: str = "") -> None:
    """Raise InvalidRequest if a number exceeds this server's limit; `what` it counts, if not the
    field's value."""
    if found is not None and found > most:
        raise InvalidRequest(
            f"{field} has {found} {what}" if what else f"{field} is {found}",
            wanted=f"at most {most}",
            remedy=f"lower {field}, or raise the limit where the server is started",
            param=field,
            code="limit_exceeded",
        )


def refuse_kind(what: str, kind: str, wanted: str, param: str) -> NoReturn:
    """Raise InvalidRequest for an item of a type that is not accepted at `param`."""
    raise InvalidRequest(
        f"{param}: found {what} of type {kind[:SHOWN]!r}, which this server does not take here",
        wanted=wanted,
        remedy="leave it out",
        param=param,
        code="unsupported_value",
    )


def refuse_fields(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise InvalidRequest about the first given field that is in `reasons`, with the reason why it
    is not supported."""
    for name, reason in reasons.items():
        if body.get(name) not in (None, False, [], {}):
            raise InvalidRequest(f"{name}: {reason}", remedy="leave it out", param=name, code="unsupported_parameter")


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors raised inside to the protocol's names.

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
        found, comma, wanted = str(error).rpartition(", wanted ")
        own = names.get(ours, ours)
        text = own + found.removeprefix(ours) + comma + re.sub(r"\w+", lambda word: names.get(word[0], word[0]), wanted)
        raise InvalidRequest(text, param=own) from None
