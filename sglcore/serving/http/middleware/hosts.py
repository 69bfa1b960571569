"""A server that only this machine should reach answers only to this machine's names.

Without it any web page could make a name of its own point here, and use the visitor's browser to ask.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from sglcore.device.server_config import is_loopback
from sglcore.serving.http.middleware.refusal import header, refuse
from sglcore.serving.replicas.errors import INVALID, Failure
from sglcore.serving.replicas.metrics import Metrics


class Hosts:
    """Checks the header Host, and Origin where a browser sends one."""

    def __init__(
        self, app: ASGIApp, allowed: tuple[str, ...], origins: tuple[str, ...], metrics: Metrics
    ) -> None:  # fmt: skip
        """`allowed` are names besides loopback's; `origins` are web pages that may ask from elsewhere."""
        self._app, self._metrics, self._origins = app, metrics, frozenset(origins)
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses with 403."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        host = (header(scope, b"host") or b"").decode("latin-1")
        if host and not self._is_ours(host):
            return await self._refuse(
                "host", f"the name {host!r} is not this server's", "allowed-hosts", scope, receive, send
            )
        origin = (header(scope, b"origin") or b"").decode("latin-1")
        if origin and not self._may_ask(origin, host):
            found = f"a web page of {origin!r} may not use this server"
            return await self._refuse("origin", found, "cors-origins", scope, receive, send)
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = name_of(host)
        return is_loopback(name) or name in self._allowed or "*" in self._allowed

    def _may_ask(self, origin: str, host: str) -> bool:
        return origin in self._origins or "*" in self._origins or origin.partition("://")[2].lower() == host.lower()

    async def _refuse(self, what: str, found: str, option: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.refused(f"{what}_not_allowed")
        message = f"{found}; start the server with --{option} to allow it"
        await refuse(Failure(403, message, INVALID, None, f"{what}_not_allowed"), scope, receive, send)


def name_of(host: str) -> str:
    """The name or address in a Host header, in lower case, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()
