"""GET /metrics: what the server counts, in the text format of Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response

from sglcore.serving.replicas.frontend import Frontend
from sglcore.serving.replicas.metrics import CONTENT_TYPE


def routes(frontend: Frontend) -> APIRouter:
    """The route; it reads numbers that are at hand and waits for no engine."""
    router = APIRouter(tags=["operations"])

    @router.get(
        "/metrics",
        response_class=Response,
        summary="Metrics for Prometheus",
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        return Response(frontend.metrics.page(), headers={"content-type": CONTENT_TYPE})

    return router
