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
"""A path -> our path for the same endpoint."""


class Paths:
    """Maps request paths to our own paths, for the app inside it."""

    def __init__(self, app: ASGIApp) -> None:
        """`app`: the app with our own paths only."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app."""
        path = SAME.get(scope.get("path", ""))
        await self._app(scope if path is None else {**scope, "path": path, "raw_path": path.encode()}, receive, send)
