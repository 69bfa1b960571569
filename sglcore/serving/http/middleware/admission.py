"""Back-pressure: beyond its limits the server says so at once, and when to come again."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from sglcore.serving.apis.server.control import PATHS
from sglcore.serving.http.errors import OLLAMA
from sglcore.serving.http.middleware.refusal import TurnedAway
from sglcore.serving.replicas.metrics import Metrics

MODEL = ("/v1/", OLLAMA)
"""What the paths of endpoints begin with that ask the model."""


class Admission:
    """Bounds the POST requests in flight, but for those of operators, and refuses those for the
    model while its queue is full."""

    def __init__(
        self, app: ASGIApp, max_concurrent: int, max_queued: int, waiting: Callable[[], int], metrics: Metrics
    ) -> None:  # fmt: skip
        """`waiting()` is how many prompts wait in the engines' queues."""
        self._app, self._metrics, self._waiting = app, metrics, waiting
        self._max_concurrent, self._max_queued = max_concurrent, max_queued
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises TurnedAway (429) and Retry-After, which is computed from how fast requests ended
        lately."""
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
