"""GET /livez, /readyz, /startupz and /health: what an orchestrator asks. They answer before the model is there."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from sglcore.serving.apis.server.answers import PhaseAnswer
from sglcore.serving.replicas.frontend import Frontend


def routes(frontend: Frontend) -> APIRouter:
    """The probes; none of them waits."""
    router = APIRouter(tags=["probes"])
    documented: Any = {200: {"model": PhaseAnswer}, 503: {"model": PhaseAnswer, "description": "Not yet, or no more"}}

    def told(is_well: bool) -> JSONResponse:
        return JSONResponse(frontend.health.snapshot(), 200 if is_well else 503)

    @router.get("/livez", responses=documented, summary="Whether the process should go on")
    async def livez() -> JSONResponse:
        return told(frontend.health.live)

    @router.get("/readyz", responses=documented, summary="Whether requests may come")
    async def readyz() -> JSONResponse:
        return told(frontend.health.ready)

    @router.get("/startupz", responses=documented, summary="Whether the model has been started")
    async def startupz() -> JSONResponse:
        return told(frontend.health.started)

    @router.get("/health", responses=documented, summary="The same as /readyz")
    async def health() -> JSONResponse:
        return told(frontend.health.ready)

    return router
