"""Frames of the TCP page transfer, and one connection with two threads: one sends queued frames,
one receives.

A frame is a head (magic number, kind, region, lease, bytes of the body) and a body. Each side sends
heartbeats while idle, so silence means that the peer is lost.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from sglcore.engine.timed_read import read_exactly
from sglcore.worker.page_transfer import PeerLost, Progress, Transfer

MAGIC = 0x5350
_HEAD = struct.Struct("<HHIQQ")
LONGEST = 1 << 32
"""Maximum number of bytes of a frame's body; a larger number means a damaged stream."""
Parts = Sequence[bytes | memoryview]


class Kind(IntEnum):
    """The kinds of frames. HELLO opens a connection, and WELCOME or REFUSED answers it; BEAT is a
    heartbeat; TOLD has a message as its body. PAGES writes to a `lease` and `region`: int32 page
    numbers, then the bytes of these pages. CANCEL asks the writer of a lease to stop, and DRAINED
    answers it."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    BEAT = 4
    PAGES = 5
    TOLD = 6
    CANCEL = 7
    DRAINED = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that arrived from peer number `peer`. `region`: index in `PageMemory.regions`;
    `lease`: the number of the lease, as the engine that owns the pages counts; both 0 where the
    kind has none."""

    peer: int
    kind: Kind
    region: int = 0
    lease: int = 0
    body: bytearray | bytes = b""


@dataclass(frozen=True, slots=True)
class Lost:
    """The last item that a `Connection` posts, after its frames: peer number `peer` is gone, and
    `why`."""

    peer: int
    why: str


def send_frame(stream: socket.socket, kind: Kind, region: int = 0, lease: int = 0, parts: Parts = ()) -> None:
    """Send a frame with the concatenated `parts` as its body; `region` and `lease` are as in
    `Frame`. Waits. Raises OSError."""
    stream.sendall(_HEAD.pack(MAGIC, kind, region, lease, sum(len(part) for part in parts)))
    for part in parts:
        stream.sendall(part)


def receive_frame(stream: socket.socket, peer: int = 0, most: int = LONGEST, seconds: float | None = None) -> Frame:
    """Receive the next frame, with at most `most` bytes in its body; `peer` is only copied to the
    result. Waits at most `seconds` for the whole frame (None: the stream's own limit).

    Raises PeerLost if the stream ends or the frame is damaged, and OSError, which includes
    TimeoutError.
    """
    until = None if seconds is None else time.monotonic() + seconds
    magic, kind, region, lease, size = _HEAD.unpack(_exactly(stream, _HEAD.size, until))
    if magic != MAGIC or size > most or not Kind.HELLO <= kind <= Kind.DRAINED:
        raise PeerLost("another engine sent data that is not a frame of this protocol")
    return Frame(peer, Kind(kind), region, lease, _exactly(stream, size, until))


def _exactly(stream: socket.socket, size: int, until: float | None) -> bytearray:
    try:
        return read_exactly(stream, size, until)
    except EOFError:
        raise PeerLost("it has closed the connection") from None


@dataclass(frozen=True, slots=True)
class _Outgoing:
    kind: Kind
    region: int
    lease: int
    parts: Parts
    ends: Transfer | None


class Connection:
    """The stream of one peer, after both sides have greeted. After `start`, its threads call `post`
    with each frame that arrives except heartbeats, with a BEAT frame when a transfer has ended (it
    only wakes the reader), and at the end once with `Lost`. The transfers of queued frames that
    could not be sent become FAILED."""

    def __init__(
        self, number: int, stream: socket.socket, name: str, silence: float, post: Callable[[Frame | Lost], None]
    ) -> None:
        """`stream` is connected, and this object closes it. `number` and `name`: the peer's, for
        `post` and messages. `silence`: seconds without a frame after which the peer is lost. No
        thread runs before `start`."""
        self.number, self.name = number, name
        self._stream, self._silence, self._post = stream, silence, post
        self._queue: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._why = ""
        stream.settimeout(silence)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [
            threading.Thread(target=self._send, name=f"pages {name}", daemon=True),
            threading.Thread(target=self._receive, name=f"pages {name}", daemon=True),
        ]

    def start(self) -> None:
        """Start the threads that send and receive."""
        for thread in self._threads:
            thread.start()

    def queue(
        self, kind: Kind, region: int = 0, lease: int = 0, parts: Parts = (), ends: Transfer | None = None
    ) -> None:
        """Queue a frame to be sent after all queued frames, with the parameters of `send_frame`;
        the transfer `ends` becomes DONE when the frame is sent, FAILED if it cannot be.

        Does not wait.
        """
        self._queue.put(_Outgoing(kind, region, lease, parts, ends))

    def break_off(self, why: str) -> None:
        """Disconnect from the peer; both threads end. `why`: the reason that `Lost` reports, if it
        is the first. Does not wait. Idempotent."""
        self._why = self._why or why
        with suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect from the peer and wait for the threads."""
        self.break_off("this engine has ended")
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._stream.close()

    def _send(self) -> None:
        broken = False
        while True:
            try:
                each = self._queue.get(timeout=self._silence / 4)
            except queue.Empty:
                each = _Outgoing(Kind.BEAT, 0, 0, (), None)
            if each is None:
                return
            try:
                if not broken:
                    send_frame(self._stream, each.kind, each.region, each.lease, each.parts)
            except OSError as error:
                broken = True
                self.break_off(f"sending to it failed: {error}")
            if each.ends is not None:
                each.ends.reason = self._why if broken else ""
                each.ends.progress = Progress.FAILED if broken else Progress.DONE
                self._post(Frame(self.number, Kind.BEAT))

    def _receive(self) -> None:
        try:
            while True:
                frame = receive_frame(self._stream, self.number)
                if frame.kind is not Kind.BEAT:
                    self._post(frame)
        except TimeoutError:
            self.break_off(f"it has sent nothing for {self._silence:g} s")
        except (PeerLost, OSError) as error:
            self.break_off(str(error))
        self._post(Lost(self.number, self._why))
