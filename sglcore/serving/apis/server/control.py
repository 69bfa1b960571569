"""Endpoints for operators that act on all clients' requests: abort and pause them, flush the prefix
cache.

The paths and fields are those of SGLang and of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from sglcore.serving.apis.answer import Answer, as_json, documented
from sglcore.serving.apis.shared_body import Body, Items
from sglcore.serving.replicas.engine_frontend import Frontend, PauseMode
from sglcore.serving.replicas.server_errors import InvalidRequest

_FLUSHES = ("/flush_cache", "/reset_prefix_cache")
PATHS = frozenset(
    {
        *("/abort_request", "/abort_requests", "/pause", "/resume", "/pause_generation", "/continue_generation"),
        *_FLUSHES,
    }
)
"""Paths that are answered even if the server is overloaded: a pause may be the cause, and an abort
the solution."""
_SGLANG_MODES: Mapping[str, PauseMode] = MappingProxyType({"abort": "abort", "retract": "keep", "in_place": "keep"})


class AbortBody(Body):
    """What to abort: the request with the id `rid` (the id of an answer, or the header
    x-request-id), or all requests with `abort_all`, which ignores `rid`. The endpoint refuses a
    body with neither; an id that is not in progress aborts nothing."""

    rid: str | None = None
    abort_all: bool = False


class AbortListBody(Body):
    """What to abort: the requests with these ids (ids of answers, or headers x-request-id). Without
    the field, or with null, all requests; an empty list aborts none."""

    request_ids: Items[str] | None = None


class PauseBody(Body):
    """The body of /pause_generation: whether running requests are aborted ("abort", the default) or
    keep their place and pages during the pause ("retract" and "in_place", which are the same
    here)."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(Body):
    """The body of /continue_generation, which has no fields."""


class AbortAnswer(Answer):
    """The number of prompts that were aborted; 0 if no id is in progress. A request may have
    several prompts."""

    aborted: int


class StatusAnswer(Answer):
    """The new state of the server: `status` is "paused" or "resumed", and `message` says the same
    for people."""

    status: str
    message: str


class PausedAnswer(Answer):
    """Whether the server is paused, so that new requests wait."""

    is_paused: bool


class FlushAnswer(Answer):
    """The number of pages that were evicted from the prefix caches of all engines; pages of running
    requests stay. `success` is always true: a failure is an error response."""

    success: bool
    pages: int


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add all endpoints to the router. Aborts do not wait; pauses, their end, and flushes wait for
    the engines, and an engine that does not answer gives status 503."""
    _add_aborts(router, frontend)
    _add_pauses(router, frontend)
    for path in _FLUSHES:

        @router.post(path, tags=["operations"], responses=documented(FlushAnswer, statuses=(503,)))
        async def flush() -> Response:
            """Evict the cached prefixes."""
            return as_json({"success": True, "pages": await frontend.flush_prefix_cache()})


def _add_aborts(router: APIRouter, frontend: Frontend) -> None:
    @router.post("/abort_request", tags=["operations"], responses=documented(AbortAnswer))
    async def abort(body: AbortBody) -> Response:
        """Abort one request, or all, and return the number of prompts that ended."""
        if not body.rid and not body.abort_all:
            raise InvalidRequest("found neither rid nor abort_all", wanted="one of them", param="rid")
        return as_json({"aborted": frontend.abort(None if body.abort_all else [body.rid or ""])})

    @router.post("/abort_requests", tags=["operations"], responses=documented(AbortAnswer))
    async def abort_several(body: AbortListBody) -> Response:
        """Abort several requests, or all, and return the number of prompts that ended."""
        return as_json({"aborted": frontend.abort(body.request_ids)})


def _add_pauses(router: APIRouter, frontend: Frontend) -> None:
    said, read = documented(StatusAnswer, statuses=(503,)), documented(StatusAnswer)

    async def halt(mode: PauseMode, flushes: bool) -> Response:
        await frontend.pause(mode)
        if flushes:
            await frontend.flush_prefix_cache()
        return as_json({"status": "paused", "message": "Generation paused"})

    async def go_on() -> Response:
        await frontend.resume()
        return as_json({"status": "resumed", "message": "Generation resumed"})

    @router.post("/pause", tags=["operations"], responses=said)
    async def pause(
        mode: Annotated[Literal["abort", "wait", "keep"], Query()] = "abort", clear_cache: bool = True
    ) -> Response:
        """Pause generation: new requests wait; running ones end, finish first, or are kept."""
        return await halt(mode, clear_cache)

    @router.post("/resume", tags=["operations"], responses=said)
    async def resume() -> Response:
        """Continue after a pause; changes nothing without one."""
        return await go_on()

    @router.post("/pause_generation", tags=["operations"], responses=read)
    async def pause_generation(body: PauseBody) -> Response:
        """Pause generation: new requests wait; running ones are aborted or kept."""
        return await halt(_SGLANG_MODES[body.mode], False)

    @router.post("/continue_generation", tags=["operations"], responses=read)
    async def continue_generation(body: ContinueBody) -> Response:
        """Continue after a pause; changes nothing without one."""
        return await go_on()

    @router.get("/is_paused", tags=["operations"], responses=documented(PausedAnswer, statuses=()))
    async def is_paused() -> Response:
        """Return whether requests are paused."""
        return as_json({"is_paused": frontend.is_paused})
