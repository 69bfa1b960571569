"""Paths that clients of other servers use, without /v1 or by another word."""

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
"""A path, and ours for the same."""


class Paths:
    """Maps request paths to our own paths, for the app inside it."""

    def __init__(self, app: ASGIApp) -> None:
        """`app` knows our own paths alone."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the app."""
        path = SAME.get(scope.get("path", ""))
        await self._app(scope if path is None else {**scope, "path": path, "raw_path": path.encode()}, receive, send)
