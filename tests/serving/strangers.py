"""Keeps libraries from contacting other hosts, and reports it if they try."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def kept_at_home(environ: Mapping[str, str]) -> Iterator[list[str]]:
    """Set these variables and refuse to look up other hosts; yield the names that were looked up,
    and fail if there are any at the end."""
    found: list[str] = []
    lookup = socket.getaddrinfo

    def local_only(host: Any, *rest: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in (None, "localhost", "127.0.0.1", "::1"):
            found.append(str(name))
            raise socket.gaierror(f"a test may not reach {name}")
        return lookup(host, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr(socket, "getaddrinfo", local_only)
        yield found
    assert found == []
