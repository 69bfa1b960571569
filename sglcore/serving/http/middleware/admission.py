"""Back-pressure: above its limits the server refuses requests at once, and says when to retry."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from sglcore.serving.apis.server.control import PATHS
from sglcore.serving.http.http_errors import OLLAMA
from sglcore.serving.http.middleware.refusal import TurnedAway
from sglcore.serving.replicas.metrics.server_metrics import Metrics

MODEL = ("/v1/", OLLAMA)
"""Prefixes of the paths that count as endpoints of the model."""


class Admission:
    """ASGI middleware that limits the POST requests in progress, operators' requests (PATHS)
    excepted, and refuses POST requests to endpoints of the model while too many requests wait in
    the engines."""

    def __init__(
        self, app: ASGIApp, max_concurrent: int, max_queued: int, waiting: Callable[[], int], metrics: Metrics
    ) -> None:  # fmt: skip
        """`max_concurrent`: maximum POST requests in progress; `max_queued`: maximum number of
        requests that may wait in the engines' queues, as `waiting()` returns it. `metrics` knows
        the time after which to retry."""
        self._app, self._metrics, self._waiting = app, metrics, waiting
        self._max_concurrent, self._max_queued = max_concurrent, max_queued
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for one request. Raises TurnedAway (429) above a limit, with Retry-After,
        which is computed from the recent rate at which requests ended."""
        if scope["method"] != "POST" or scope["path"] in PATHS:
            return await self._app(scope, receive, send)
        self._check(scope["path"])
        self._in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1

    def _check(self, path: str) -> None:
        is_asked = path.startswith(MODEL)
        waiting = self._waiting() if is_asked else 0
        if self._in_flight >= self._max_concurrent:
            found = f"{self._in_flight} requests are in flight, where max_concurrent_requests is {self._max_concurrent}"
        elif is_asked and waiting > self._max_queued:
            found = f"{waiting} prompts wait, where max_queued_requests is {self._max_queued}"
        else:
            return
        seconds = self._metrics.retry_after(waiting)
        raise TurnedAway(429, f"{found}; try again in {seconds} s", "overloaded", {"retry-after": str(seconds)})
