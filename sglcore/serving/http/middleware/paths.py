"""Paths that clients of other servers use: without /v1, or with another name."""

from __future__ import annotations

from types import MappingProxyType

from starlette.types import ASGIApp, Receive, Scope, Send

_PLAIN = (
    "chat/completions",
    "completions",
    "embeddings",
    "messages",
    "models",
    "responses",
    "rerank",
    "score",
    "classify",
)
SAME = MappingProxyType({**{f"/{name}": f"/v1/{name}" for name in _PLAIN}, "/reranking": "/v1/rerank"})
"""Paths of other servers -> our path of the same endpoint."""


class Paths:
    """ASGI middleware that replaces the paths in SAME, of other servers, by our own; the answer is
    the same, not a redirect."""

    def __init__(self, app: ASGIApp) -> None:
        """`app`: the ASGI app to wrap."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for one request."""
        path = SAME.get(scope.get("path", ""))
        await self._app(scope if path is None else {**scope, "path": path, "raw_path": path.encode()}, receive, send)
