"""Reading from file descriptors with a time limit, also from descriptors of 1024 and above, which
`select.select` does not accept."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from typing import Protocol

DAY = 86400.0
"""Seconds of a day, the longest wait: the system does not accept waits of a month."""


class Numbered(Protocol):
    """An object with a file descriptor, such as a socket: what `is_readable` waits for."""

    def fileno(self) -> int:
        """Return the file descriptor; -1 once it is closed."""
        ...


def is_readable(source: int | Numbered, seconds: float = 0.0) -> bool:
    """Return whether a read from a descriptor would not wait: there is data, an end or an error.
    Waits at most `seconds` for it, and at most a day. Raises OSError if the descriptor is closed.
    """
    number = source if isinstance(source, int) else source.fileno()
    if number < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(min(max(0.0, seconds), DAY) * 1000))


def read_exactly(stream: socket.socket, size: int, until: float | None) -> bytearray:
    """Read `size` bytes. Waits until the time `until` of `time.monotonic` (None: the timeout of the
    socket).

    The socket's timeout also serves its sender and is not changed. Raises EOFError if the stream
    ends first, and OSError, which includes TimeoutError.
    """
    body = bytearray(size)
    rest = memoryview(body)
    while rest:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("it has sent too little data for too long")
            if not is_readable(stream, left):
                continue
        got = stream.recv_into(rest)
        if not got:
            raise EOFError("the stream has ended")
        rest = rest[got:]
    return body
