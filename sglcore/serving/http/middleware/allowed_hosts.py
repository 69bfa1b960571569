"""Checks the header Host, so that a server for this machine answers only to this machine's names.

Otherwise any web page could let a name of its own resolve to this machine, and use the visitor's
browser to send requests.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from sglcore.config.server_config import is_loopback
from sglcore.serving.http.middleware.refusal import TurnedAway, header


class Hosts:
    """ASGI middleware that refuses (403) a request with a Host header that is neither loopback's
    nor an allowed name, and one from a web page if its Origin is not allowed and has another host
    or port than the header Host (loopback is no exception)."""

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...], origins: tuple[str, ...]) -> None:
        """`allowed`: names that Host may have in addition to loopback's; `origins`: Origin headers
        of other web pages that may send requests. "*" allows all, in either."""
        self._app, self._origins = app, frozenset(origins)
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for one request. Raises TurnedAway (403) for another Host or Origin. A
        missing header is accepted, but an Origin without Host only if it is allowed."""
        host = (header(scope, b"host") or b"").decode("latin-1")
        if host and not self._is_ours(host):
            raise _turned_away("host", f"the name {host!r} is not this server's", "allowed-hosts")
        origin = (header(scope, b"origin") or b"").decode("latin-1")
        if origin and not self._may_ask(origin, host):
            raise _turned_away("origin", f"a web page of {origin!r} may not use this server", "cors-origins")
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = name_of(host)
        return is_loopback(name) or name in self._allowed or "*" in self._allowed

    def _may_ask(self, origin: str, host: str) -> bool:
        return origin in self._origins or "*" in self._origins or origin.partition("://")[2].lower() == host.lower()


def _turned_away(what: str, found: str, option: str) -> TurnedAway:
    return TurnedAway(403, f"{found}; start the server with --{option} to allow it", f"{what}_not_allowed")


def name_of(host: str) -> str:
    """Return the name or address in a Host header, in lower case, without port, brackets and final
    dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()
