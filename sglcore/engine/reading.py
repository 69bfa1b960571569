"""Reading from descriptors with a limit of time, whatever their number: `select` takes none from
1024 on."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from typing import Protocol

DAY = 86400.0
"""Seconds. The system counts no wait of a month."""


class Numbered(Protocol):
    """What has a descriptor."""

    def fileno(self) -> int:
        """Its number; -1 once it is closed."""
        ...


def is_readable(source: int | Numbered, seconds: float = 0.0) -> bool:
    """Whether there is something to read, or to learn of an end or an error; waits for it so long,
    a day at most. Raises OSError where it is closed."""
    number = source if isinstance(source, int) else source.fileno()
    if number < 0:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(min(max(0.0, seconds), DAY) * 1000))


def read_exactly(stream: socket.socket, size: int, until: float | None) -> bytearray:
    """Read `size` bytes. Waits until `until` of time.monotonic (None: the stream's own limit).

    The stream's limit also serves its sender and is left as it is. Raises EOFError if the stream
    ends first, and OSError, which includes TimeoutError.
    """
    body = bytearray(size)
    rest = memoryview(body)
    while rest:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("it has said too little for too long")
            if not is_readable(stream, left):
                continue
        got = stream.recv_into(rest)
        if not got:
            raise EOFError("the stream has ended")
        rest = rest[got:]
    return body
