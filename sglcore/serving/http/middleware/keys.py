"""API keys: a request without a valid key learns nothing, not even by the time that a comparison
takes."""

from __future__ import annotations

import hmac
from hashlib import sha256

from starlette.types import ASGIApp, Receive, Scope, Send

from sglcore.serving.http.middleware.refusal import TurnedAway, header

OPEN = frozenset({"/", "/livez", "/readyz", "/startupz", "/health"})
"""Paths that need no key for GET and HEAD: the page, and probes."""


class Keys:
    """ASGI middleware that accepts requests with one of the keys, in `Authorization: Bearer ...` or
    in `x-api-key`, and GET and HEAD requests for OPEN paths."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        """`keys`: the accepted keys; with none, every path outside OPEN is refused. Only their
        digests are kept."""
        self._app = app
        self._digests = tuple(sha256(key.encode()).digest() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for one request. Raises TurnedAway (401) without a valid key, except for GET
        and HEAD of OPEN paths; if both headers bring a key, one valid key is enough."""
        offered = _offered(scope)
        if not (self._is_open(scope) or sum(self._matches(each) for each in offered)):
            found = "the API key is not one of this server's" if offered else "the request brings no API key"
            message = f"{found}; send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise TurnedAway(401, message, "invalid_api_key", {"www-authenticate": "Bearer"})
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in OPEN

    def _matches(self, offered: bytes) -> int:
        """Return the number of keys that equal `offered` (0: it is no valid key). Digests of equal
        length are compared with every key, so that the time reveals neither which key matches nor
        how much of it."""
        digest = sha256(offered).digest()
        return sum(hmac.compare_digest(digest, each) for each in self._digests)


def _offered(scope: Scope) -> list[bytes]:
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return [each for each in (bearer, header(scope, b"x-api-key")) if each]
