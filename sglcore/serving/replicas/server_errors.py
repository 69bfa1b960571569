"""Errors of the server, and what the client gets for every exception: status, message, type, field
and code.

An error of the caller is reported in full. A defect of the server is reported with an id, which the
log has too.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from sglcore.core.errors import SglcoreError
from sglcore.engine.tokenizers.text_codec import TextError
from sglcore.sampling.grammar_spec import GrammarError
from sglcore.sampling.params import SamplingError
from sglcore.schedule.request_errors import ContextError, RequestError

INVALID = "invalid_request_error"
GOES_ON = "the server goes on: send the request again when /readyz answers 200"
RESTARTS = "another engine is started: send the request again when /readyz answers 200"
ENDS = (
    "this server ends, and does not come back by itself: send the request to another one, or after it was started again"
)
"""Remedies for a client that got no answer, or a part of one: the server continues, restarts an
engine, or ends."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class Overloaded(SglcoreError):
    """The server accepts no requests for now, because too many wait (429, with Retry-After)."""

    def __init__(self, found: str, *, retry_after: float, wanted: str = "") -> None:
        """`found`: what is too much; `wanted`: the limit (empty: not said); `retry_after`: seconds
        after which a retry makes sense."""
        super().__init__(found, wanted=wanted, remedy="try again later")
        self.retry_after = retry_after


class NotReady(SglcoreError):
    """The model cannot answer yet, or not any more (503). A subclass says that it never will."""

    def __init__(self, found: str, remedy: str = "try again when /readyz answers 200") -> None:
        """`found`: the server's state, as in /readyz."""
        super().__init__(found, remedy=remedy)


class ShuttingDown(NotReady):
    """The server is ending: a signal told it to stop, or it has no engine any more (503)."""

    def __init__(self, found: str) -> None:
        """`found`: why it ends."""
        super().__init__(found, ENDS)


class EngineDied(SglcoreError):
    """The engine process that had this request has ended (503)."""

    def __init__(self, found: str, remedy: str) -> None:
        """`found`: how it ended; `remedy`: from `Health.remedy`."""
        super().__init__(found, remedy=remedy)


class NotAnswering(SglcoreError):
    """An engine process did not answer an operator's order in time (503); it may execute the order
    later."""

    def __init__(self, who: str, why: str) -> None:
        """`who`: the replica; `why`: why no answer is expected."""
        super().__init__(f"{who} does not answer: {why}", remedy="try again later; one that stays silent is killed")


class Unserved(SglcoreError):
    """A request that was not run because something is missing, such as another engine, that may
    come back (503)."""

    def __init__(self, found: str) -> None:
        """`found`: what is missing."""
        super().__init__(found, remedy="try again; while /readyz does not answer 200, ask another server")


class StorageError(SglcoreError):
    """The server could not write data that it must keep (507 if the disk is full, else 500).
    `is_full`: whether the disk is full."""

    def __init__(self, found: str, *, is_full: bool) -> None:
        """`found`: what could not be written, and why; `is_full`: there was no space."""
        super().__init__(found, remedy=f"{'free space' if is_full else 'correct that'} there, and try again")
        self.is_full = is_full


class InvalidRequest(SglcoreError, ValueError):
    """A request that is refused because of the caller's error (400, or another `status`)."""

    def __init__(
        self, found: str, *, wanted: str = "", remedy: str = "", param: str | None = None, code: str | None = None,
        status: int = 400,
    ) -> None:  # fmt: skip
        """`found`, `wanted` and `remedy`: the parts of the message; `param`: the name of the
        request's field at fault (None: no single field); `code`: OpenAI's code, for programs (None:
        none); `status`: the HTTP status."""
        super().__init__(found, wanted=wanted, remedy=remedy)
        self.param, self.code, self.status = param, code, status


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client gets for an error, for any protocol: the HTTP status, and OpenAI's `message`,
    `type`, `param` and `code`. `headers` are sent with it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)


class Unanswered(SglcoreError):
    """A request that has no answer; the client gets `failure`, with the status and text in it."""

    def __init__(self, failure: Failure) -> None:
        """`failure`: that of the first sample, if several failed."""
        super().__init__(failure.message)
        self.failure = failure


def failure(error: BaseException) -> Failure | None:
    """Return what a client gets for an error that it may see; None for a defect of ours, which only
    the log may describe. Nothing is logged here: `told` does that."""
    if isinstance(error, Unanswered):
        return error.failure
    if isinstance(error, InvalidRequest):
        return Failure(error.status, str(error), INVALID, error.param, error.code)
    if isinstance(error, Overloaded):
        return Failure(429, str(error), "rate_limit_error", code="overloaded", headers=_retry_after(error.retry_after))
    if isinstance(error, ShuttingDown):
        return Failure(503, str(error), "unavailable_error", code="shutting_down")
    if isinstance(error, NotReady):
        return Failure(503, str(error), "unavailable_error", code="not_ready", headers=_retry_after(1.0))
    if isinstance(error, Unserved):
        return Failure(503, str(error), "unavailable_error", code="unserved", headers=_retry_after(1.0))
    if isinstance(error, NotAnswering):
        return Failure(503, str(error), "unavailable_error", code="not_answering", headers=_retry_after(5.0))
    if isinstance(error, EngineDied):
        return Failure(503, str(error), "unavailable_error", code="engine_died")
    if isinstance(error, StorageError):
        status, code = (507, "insufficient_storage") if error.is_full else (500, "storage_failed")
        return Failure(status, str(error), "server_error", code=code)
    if isinstance(error, SamplingError):
        return Failure(400, str(error), INVALID, parameter_of(error))
    if isinstance(error, RequestError | TextError | GrammarError):
        code = "context_length_exceeded" if isinstance(error, ContextError) else None
        return Failure(400, str(error), INVALID, None if isinstance(error, GrammarError) else error.field, code)
    return None


def told(error: BaseException) -> Failure:
    """Return what a client gets for any error. A defect of ours is logged under an id, and the
    client gets only the id."""
    found = failure(error)
    if found is not None:
        return found
    error_id = f"err-{secrets.token_hex(8)}"
    logging.getLogger("sglcore.serving").error("%s: %s: %s", error_id, type(error).__name__, error, exc_info=error)
    message = f"an error inside the server; its log has it under {error_id}"
    return Failure(500, message, "server_error", code="internal_error")


def ended_badly(reason: str, text: str) -> Failure:
    """Return what a client gets for a sample that ended by `reason` "error" or "abort"; `text`: the
    engine's description (empty: a general one)."""
    if reason == "abort":
        return Failure(503, text or "the request was aborted before it ended", "unavailable_error", code="aborted")
    return Failure(500, text or "the engine ended this request by an error", "server_error", code="engine_error")


@contextmanager
def blame(param: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of the block as InvalidRequest about the request's field `param`, unless the
    error names another field; message, code and status stay. An empty `param` names no field.

    `kinds`: types of errors; by default InvalidRequest, RequestError, TextError and GrammarError.
    Others, SamplingError too, pass unchanged.
    """
    meant = kinds or (InvalidRequest, RequestError, TextError, GrammarError)
    try:
        yield
    except meant as error:
        found = failure(error)
        assert found is not None
        raise InvalidRequest(
            found.message, param=found.param or param or None, code=found.code, status=found.status
        ) from error


def _retry_after(seconds: float) -> Mapping[str, str]:
    return MappingProxyType({"retry-after": str(max(1, math.ceil(seconds)))})


def parameter_of(error: SamplingError) -> str | None:
    """Return the name of the parameter with which the message of an error begins, such as "top_p";
    None if its first word is no name."""
    name = str(error).partition(":")[0].partition("[")[0].partition(" ")[0]
    return name if name.isidentifier() else None
