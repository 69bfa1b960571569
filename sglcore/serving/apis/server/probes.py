"""GET and HEAD /livez, /readyz, /startupz and /health: probes for an orchestrator. They answer
before the model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import ConfigDict

from sglcore.serving.apis.answer import Answer
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.metrics.health import Health


class PhaseAnswer(Answer):
    """The state of the server: its phase, `done` of `total` units of the phase (both 0 where units
    are not counted), `elapsed_s`, and `reason`, a text that is present only if there is a problem.
    `elapsed_s`: seconds since the server began; once it has been ready, the duration of its
    start, which no longer changes."""

    model_config = ConfigDict(extra="allow")

    phase: str
    done: int | None = None
    total: int | None = None
    elapsed_s: float


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """Add the probes to the router; none of them waits. Each answers 200 for yes and 503 for no,
    with a `PhaseAnswer` in both cases."""
    health = frontend.health
    _add(router, "/livez", health, lambda: health.live, "Whether the process should keep running")
    _add(router, "/readyz", health, lambda: health.ready, "Whether the server accepts requests")
    _add(router, "/startupz", health, lambda: health.started, "Whether the model has been started")
    _add(router, "/health", health, lambda: health.ready, "The same as /readyz")


def _add(router: APIRouter, path: str, health: Health, is_well: Callable[[], bool], summary: str) -> None:
    documented: Any = {200: {"model": PhaseAnswer}, 503: {"model": PhaseAnswer, "description": "Not yet, or no longer"}}

    @router.head(path, include_in_schema=False)
    @router.get(path, tags=["probes"], responses=documented, summary=summary)
    async def probe() -> JSONResponse:
        return JSONResponse(health.snapshot(), 200 if is_well() else 503)
