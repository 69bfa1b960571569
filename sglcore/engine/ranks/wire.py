"""Frames on a stream socket between the leader and ranks or nodes, the same within a machine and
between machines. The end of the stream means that the peer is gone.

A frame has the epoch (the number of one start of the ranks); a frame of another epoch is counted
and dropped.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from sglcore.core.errors import SglcoreError
from sglcore.engine.timed_read import read_exactly

MAGIC = 0x5347
_HEAD = struct.Struct("<HHIQ")
LONGEST = 1 << 32
"""Maximum number of bytes of a frame's body; a larger number means a damaged stream."""
LONGEST_HELLO = 1 << 20
"""Maximum number of bytes of the first frame's body, before the sender is identified."""


class Kind(IntEnum):
    """The kind of a frame. To a rank: STEP (a batch), COLLECT, CLOSE. From a rank: HELLO, PROGRESS,
    READY, BEAT, FAILED, RESULT, CLOSED. To another node: ORDER (the ranks to start), BEAT, CLOSE.
    From another node: HELLO, FAILED, BEAT, STARTED, ENDED."""

    HELLO = 1
    STEP = 2
    COLLECT = 3
    CLOSE = 4
    PROGRESS = 5
    READY = 6
    BEAT = 7
    FAILED = 8
    RESULT = 9
    CLOSED = 10
    ORDER = 11
    STARTED = 12
    ENDED = 13


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame without its head, as `Channel.receive` returns it: the kind, and the bytes
    of the body."""

    kind: Kind
    body: bytearray


class Gone(SglcoreError):
    """A channel cannot be used any more: the peer has closed it (most often because its process
    ended), has sent data that is no frame, or did not read what was sent in time."""

    exit_code = 1


class Channel:
    """One end of a stream of frames. One thread may send while another receives. `dropped`: number
    of received frames of another epoch."""

    def __init__(self, stream: socket.socket, epoch: int) -> None:
        """`epoch`: the number of the start of the ranks, below 2**32; frames of another are
        dropped. The channel closes the stream."""
        self.dropped = 0
        self._stream, self._epoch = stream, epoch
        self._limit: float | None = None
        if stream.family in (socket.AF_INET, socket.AF_INET6):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the descriptor for a selector; -1 once it is closed."""
        return self._stream.fileno()

    @property
    def addresses(self) -> tuple[str, str]:
        """The two addresses of a TCP stream: that of the other end, and that of this machine.
        Raises OSError."""
        return self._stream.getpeername()[0], self._stream.getsockname()[0]

    def send(self, kind: Kind, body: bytes | bytearray = b"") -> None:
        """Send a frame; blocks while the peer's buffer is full. Raises Gone if the peer has closed,
        or if sending takes longer than `wait_at_most` allows; the channel cannot be used any more
        then."""
        self.send_packed(self.packed(kind, body))

    def packed(self, kind: Kind, body: bytes | bytearray = b"") -> bytes:
        """Return a frame's bytes, for `send_packed` on several channels of one epoch."""
        return _HEAD.pack(MAGIC, kind, self._epoch, len(body)) + body

    def send_packed(self, frame: bytes) -> None:
        """Send a frame that `packed` made on a channel of the same epoch; blocks while the peer's
        buffer is full. Raises Gone if the peer has closed, or if sending takes longer than
        `wait_at_most` allows; a part of the frame may have been sent then, so the channel cannot be
        used any more."""
        try:
            self._stream.sendall(frame)
        except OSError as error:
            raise Gone(f"the other end of a channel is gone: {error}") from None

    def receive(self, most: int = LONGEST) -> Frame:
        """Return the next frame of this epoch, with at most `most` bytes in its body; waits for it.
        Raises Gone at the end of the stream and for a damaged or longer frame, and TimeoutError if
        the frame takes longer than `wait_at_most` allows."""
        until = None if self._limit is None else time.monotonic() + self._limit
        while True:
            magic, kind, epoch, size = _HEAD.unpack(self._exactly(_HEAD.size, until))
            if magic != MAGIC or size > most:
                raise Gone("a channel received data that is not a frame")
            body = self._exactly(size, until)
            if epoch == self._epoch:
                return Frame(Kind(kind), body)
            self.dropped += 1

    def wait_at_most(self, seconds: float | None) -> None:
        """Set the seconds that `receive` waits for a whole frame before it raises TimeoutError, and
        that sending a frame may take before it raises Gone; None: no limit."""
        self._limit = seconds
        self._stream.settimeout(seconds)

    def hang_up(self) -> None:
        """End the stream for both sides, and wake every thread that waits in `receive`.

        Idempotent.
        """
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the stream. Idempotent."""
        self.hang_up()
        self._stream.close()

    def _exactly(self, size: int, until: float | None) -> bytearray:
        try:
            return read_exactly(self._stream, size, until)
        except TimeoutError:
            raise
        except OSError as error:
            raise Gone(f"a channel broke: {error}") from None
        except EOFError:
            raise Gone("the other end of a channel has closed it") from None


def listen(folder: Path | None, host: str = "", port: int = 0) -> tuple[socket.socket, str]:
    """Return a listening socket and its address, in the form that `connect` takes: a file in
    `folder`, or without a folder TCP at the address `host` of this machine ("": all IPv4
    addresses); port 0 takes a free one. Raises OSError."""
    if folder is not None:
        stream = socket.socket(socket.AF_UNIX)
        stream.bind(str(folder / "ranks"))
        address = f"unix:{folder / 'ranks'}"
    else:
        stream = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        address = tcp_address(host, stream.getsockname()[1])
    stream.listen(256)
    return stream, address


def tcp_address(host: str, port: int) -> str:
    """Return a TCP address in the form that `connect` takes, tcp:HOST:PORT."""
    return f"tcp:{host}:{port}"


def connect(address: str, timeout: float | None = None) -> socket.socket:
    """Return a stream to an address that `listen` or `tcp_address` returned. Waits, for TCP at most
    `timeout` seconds (None: no limit). Raises OSError."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(where)
        return stream
    host, _, port = where.rpartition(":")
    stream = socket.create_connection((host, int(port)), timeout=timeout)
    stream.settimeout(None)
    return stream
