"""GET /livez, /readyz, /startupz and /health: what an orchestrator asks. They answer before the model is there."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import ConfigDict

from sglcore.serving.apis.answer import Answer
from sglcore.serving.replicas.frontend import Frontend


class PhaseAnswer(Answer):
    """How far the server is: `done` of `total` parts of a phase, seconds since its start."""

    model_config = ConfigDict(extra="allow")

    phase: str
    done: int | None = None
    total: int | None = None
    elapsed_s: float


def add_routes(router: APIRouter, frontend: Frontend) -> None:
    """The probes; none of them waits."""
    documented: Any = {200: {"model": PhaseAnswer}, 503: {"model": PhaseAnswer, "description": "Not yet, or no more"}}

    def told(is_well: bool) -> JSONResponse:
        return JSONResponse(frontend.health.snapshot(), 200 if is_well else 503)

    @router.get("/livez", tags=["probes"], responses=documented, summary="Whether the process should go on")
    async def livez() -> JSONResponse:
        return told(frontend.health.live)

    @router.get("/readyz", tags=["probes"], responses=documented, summary="Whether requests may come")
    async def readyz() -> JSONResponse:
        return told(frontend.health.ready)

    @router.get("/startupz", tags=["probes"], responses=documented, summary="Whether the model has been started")
    async def startupz() -> JSONResponse:
        return told(frontend.health.started)

    @router.get("/health", tags=["probes"], responses=documented, summary="The same as /readyz")
    async def health() -> JSONResponse:
        return told(frontend.health.ready)
