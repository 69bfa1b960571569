"""The address of a server, and short requests to it.

Uses only the standard library. Requests block until the answer arrives.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sglcore.core.errors import ConfigError, SglcoreError

NOT_SAID = "the server gave no details"


class ServerError(SglcoreError):
    """A server cannot be reached, answers with an error status, or with something that is not
    understood."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server, and its API key.

    `folder` is the path before the routes, such as /proxy, or "". `key` is "" without a key, and is
    not part of the representation.
    """

    host: str
    port: int
    is_secure: bool = False
    folder: str = ""
    key: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"http{'s' if self.is_secure else ''}://{self.host}:{self.port}{self.folder}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers that every request to the server needs: host, accepted types, and the API key
        if there is one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        known = {"Host": f"{host}:{self.port}", "Accept": "application/json, text/event-stream"}
        return {**known, **({"Authorization": f"Bearer {self.key}"} if self.key else {})}

    def connect(self, timeout: float | None = 30.0) -> http.client.HTTPConnection:
        """Return a new connection, which its first request opens; the caller closes it.

        `timeout` is the limit in seconds for each wait on the network; None is no limit.
        """
        kind = http.client.HTTPSConnection if self.is_secure else http.client.HTTPConnection
        return kind(self.host, self.port, timeout=timeout)


def address(url: str, key: str = "") -> Address:
    """Return the address in a URL such as http://127.0.0.1:8000.

    The default scheme is http, and a /v1 at the end is dropped. `key` is the API key. Raises
    ConfigError for an invalid URL, with --url as its name.
    """
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url is {url!r}: {error}", wanted="such as http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url is {url!r}", wanted="http:// or https:// and a host, such as http://127.0.0.1:8000")
    folder = parts.path.rstrip("/").removesuffix("/v1")
    is_secure = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if is_secure else 80), is_secure, folder, key)


def get_json(where: Address, path: str) -> Any:
    """Return the parsed JSON answer to a GET of `path`, which follows the address's folder; waits.
    Raises ServerError if there is no answer, if its status is not 200, or if it is not JSON."""
    connection = where.connect()
    try:
        connection.request("GET", where.folder + path, headers=where.headers)
        response = connection.getresponse()
        status, content = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(where, error) from None
    finally:
        connection.close()
    if status != 200:
        raise ServerError(f"{where}{path} answered {status}: {refusal(content)}")
    try:
        return json.loads(content)
    except ValueError:
        raise ServerError(
            f"{where}{path} answered with something else than JSON: {refusal(content)}", remedy="check --url"
        ) from None


def unreachable(where: Address, error: Exception) -> ServerError:
    """Return, without raising it, the error for a server to which a connection failed with
    `error`."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ServerError(f"{where} cannot be reached: {reason}", remedy="start it with `sglcore serve`, or check --url")


def refusal(content: bytes) -> str:
    """Return the message in the body of an error response, never empty.

    JSON with "error" or "detail" is understood. Of other text, it is the first 200 bytes; of an
    empty body, a fixed phrase.
    """
    try:
        found = json.loads(content)
    except ValueError:
        return content[:200].decode("utf-8", "replace").strip() or NOT_SAID
    error = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
    return str(error.get("message", error) if isinstance(error, dict) else error) or NOT_SAID


def served_model(where: Address) -> str:
    """Return the name of the first model that the server lists; waits. Raises ServerError if it
    lists none, and as `get_json` does."""
    listed = get_json(where, "/v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    names = [each["id"] for each in models or () if isinstance(each, dict) and "id" in each]
    if not names:
        raise ServerError(f"{where} serves no model", remedy="name one with --model-name")
    return str(names[0])
