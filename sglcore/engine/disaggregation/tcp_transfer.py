"""The reference page transfer: over TCP, one connection for each pair of engines, through host
memory.

Received pages stay on the host until the worker's own thread writes them, between two steps. Pages
for a lease that is cancelled but not drained are still written, as by a library that writes without
the host; so a caller that reuses such pages too early is found out.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

import msgspec
import numpy as np

from sglcore.device.errors import ConfigError
from sglcore.device.page_transfer import Ints, Layout, PageMemory, PeerLost, Progress, Told, Transfer
from sglcore.engine.disaggregation.tcp_frames import Connection, Frame, Kind, Lost, receive_frame, send_frame
from sglcore.engine.timed_read import is_readable

SILENCE = 20.0
"""Seconds without a frame after which a peer is lost."""
GREETING = 5.0
"""Seconds that a new connection may take to identify itself."""
LONGEST_HELLO = 1 << 16
"""Bytes of the greeting at most."""


class Hello(msgspec.Struct):
    """The greeting: what a side reports about itself first."""

    layout: dict[str, str | int]
    secret: str = ""


@dataclass(slots=True)
class _Lease:
    peer: int
    pages: frozenset[int]
    is_drained: bool = False


class TcpPages:
    """A PageTransfer over TCP. `address`: HOST:PORT where it listens, if `listens` was given."""

    def __init__(
        self, memory: PageMemory, layout: Layout, listens: str = "", secret: str = "", silence: float = SILENCE
    ) -> None:
        """`listens`: HOST:PORT (port 0 takes a free one); a peer must know the `secret`. Raises
        ConfigError."""
        self._memory, self._layout, self._secret, self._silence = memory, layout, secret, silence
        self._connections: dict[int, Connection] = {}
        self._numbers = 0
        self._inbox: deque[Frame | Lost] = deque()
        self._leases: dict[int, _Lease] = {}
        self._offered = 0
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._awake, False)
        self._lock = threading.Lock()
        self._is_closed = False
        self._listener = _listen(listens) if listens else None
        self.address = "" if self._listener is None else _name(self._listener.getsockname())
        self._greeter = threading.Thread(target=self._accept, name="pages", daemon=True)
        if self._listener is not None:
            self._greeter.start()

    @property
    def peers(self) -> tuple[int, ...]:
        """Numbers of the connected peers."""
        return tuple(self._connections)

    @property
    def has_news(self) -> bool:
        """Whether something has arrived."""
        return bool(self._inbox) or is_readable(self._awake)

    @property
    def num_leases(self) -> int:
        """Number of leases that have not ended."""
        return len(self._leases)

    def connect(self, address: str) -> int:
        """Connect and exchange greetings; waits at most 5 seconds for each."""
        host, _, port = address.rpartition(":")
        with ExitStack() as stack:
            try:
                stream = stack.enter_context(socket.create_connection((host, int(port)), timeout=GREETING))
                send_frame(stream, Kind.HELLO, parts=(self._hello(self._secret),))
                answer = receive_frame(stream, most=LONGEST_HELLO, seconds=GREETING)
            except (OSError, PeerLost) as error:
                raise PeerLost(f"there is no prompt engine at {address}: {error}") from None
            stack.pop_all()
        if answer.kind is not Kind.WELCOME:
            stream.close()
            raise ConfigError(f"the prompt engine at {address} refused: {bytes(answer.body).decode(errors='replace')}")
        return self._greet(stream, address)

    def name(self, peer: int) -> str:
        """Return a peer's address."""
        found = self._connections.get(peer)
        return f"peer {peer}" if found is None else found.name

    def tell(self, peer: int, body: bytes) -> None:
        """Send a message to a peer, in a frame after the frames of pages."""
        self._queue(peer, Kind.TOLD, parts=(body,))

    def receive(self, seconds: float = 0.0) -> list[Told]:
        """Write the pages that arrived, and return everything else."""
        if is_readable(self._awake, 0.0 if self._inbox else seconds):
            with suppress(BlockingIOError):
                while os.read(self._awake, 4096):
                    pass
        found: list[Told] = []
        while self._inbox:
            each = self._inbox.popleft()
            told = self._lose(each) if isinstance(each, Lost) else self._take(each)
            found += [told] if told is not None else []
        return found

    def offer(self, peer: int, pages: Ints) -> int:
        """Offer pages to a peer and return the lease's number, which the peer gets in a message."""
        self._offered += 1
        self._leases[self._offered] = _Lease(peer, frozenset(pages.tolist()), peer not in self._connections)
        return self._offered

    def cancel(self, lease: int) -> None:
        """Ask the writer to stop. Its DRAINED frame comes after everything that it has written."""
        found = self._leases.get(lease)
        if found is not None and not found.is_drained:
            self._queue(found.peer, Kind.CANCEL, lease=lease)

    def end(self, lease: int) -> None:
        """End a lease. Pages that arrive for it later break the connection."""
        self._leases.pop(lease, None)

    def drained(self, lease: int) -> bool:
        """Whether no more pages come: the writer's DRAINED frame has arrived (it comes after its
        pages), or the connection is closed and all its frames are processed.
        """
        found = self._leases.get(lease)
        return found is None or found.is_drained

    def write(
        self, peer: int, lease: int, source: Ints, target: Ints, layers: tuple[int, int] | None = None
    ) -> Transfer:
        """Read the pages at once, which waits for this device, and queue them; does not wait for
        the peer."""
        transfer = Transfer()
        connection = self._connections.get(peer)
        if connection is None:
            transfer.progress, transfer.reason = Progress.FAILED, "the other engine is gone"
            return transfer
        regions = self._memory.regions
        chosen = [n for n, each in enumerate(regions) if layers is None or layers[0] <= each.layer < layers[1]]
        for region in chosen:
            data = np.ascontiguousarray(self._memory.read(region, source))
            parts = (target.astype("<i4").tobytes(), data.reshape(-1).data)
            connection.queue(Kind.PAGES, region, lease, parts, transfer if region == chosen[-1] else None)
        if not chosen:
            transfer.progress = Progress.DONE
        return transfer

    def fileno(self) -> int:
        """The read end of a pipe."""
        return self._awake

    def close(self) -> None:
        """Disconnect from all peers, and free all resources."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._greeter.join()
        for connection in list(self._connections.values()):
            connection.close()
        self._connections.clear()
        os.close(self._awake)
        os.close(self._wake)

    def _queue(self, peer: int, kind: Kind, lease: int = 0, parts: tuple[bytes, ...] = ()) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            connection.queue(kind, lease=lease, parts=parts)

    def _take(self, frame: Frame) -> Told | None:
        if frame.kind is Kind.PAGES:
            self._write_pages(frame)
        elif frame.kind is Kind.TOLD:
            return Told(frame.peer, bytes(frame.body))
        elif frame.kind is Kind.CANCEL:
            # Frames are sent in order, and this thread, which got the message, writes no more
            # pages: no page of this lease can follow.
            self._queue(frame.peer, Kind.DRAINED, frame.lease)
            return Told(frame.peer, cancelled=frame.lease)
        elif frame.kind is Kind.DRAINED and (lease := self._leases.get(frame.lease)) is not None:
            lease.is_drained = lease.is_drained or lease.peer == frame.peer
        return None

    def _write_pages(self, frame: Frame) -> None:
        lease, regions = self._leases.get(frame.lease), self._memory.regions
        if lease is not None and lease.peer == frame.peer and not lease.is_drained and frame.region < len(regions):
            count, rest = divmod(len(frame.body), 4 + regions[frame.region].bytes_per_page)
            pages = np.frombuffer(frame.body, "<i4", 0 if rest else count)
            if not rest and lease.pages.issuperset(pages.tolist()):
                data = np.frombuffer(frame.body, np.uint8, offset=4 * count).reshape(count, -1)
                self._memory.write(frame.region, pages, data)
                return
        self._connections[frame.peer].break_off(f"it wrote pages that lease {frame.lease} does not have")

    def _lose(self, lost: Lost) -> Told:
        connection = self._connections.pop(lost.peer)
        for lease in self._leases.values():
            lease.is_drained = lease.is_drained or lease.peer == lost.peer
        connection.close()
        return Told(lost.peer, lost=f"the engine at {connection.name} is gone: {lost.why}")

    def _post(self, each: Frame | Lost) -> None:
        self._inbox.append(each)
        with suppress(BlockingIOError, OSError):
            os.write(self._wake, b"\0")

    def _greet(self, stream: socket.socket, name: str) -> int:
        """Check the peer's greeting before anything else of it is processed."""
        with self._lock:
            if self._is_closed:
                stream.close()
                raise PeerLost("this engine has ended")
            self._numbers += 1
            number = self._numbers
            connection = Connection(number, stream, name, self._silence, self._post)
            self._connections[number] = connection
            connection.start()
        return number

    def _hello(self, secret: str) -> bytes:
        return msgspec.msgpack.encode(Hello(asdict(self._layout), secret))

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                stream, where = self._listener.accept()
            except OSError:
                return
            # One thread for each, so that a peer that sends nothing does not block other peers.
            threading.Thread(
                target=self._hear_out, args=(stream, _name(where)), name="pages greeting", daemon=True
            ).start()

    def _hear_out(self, stream: socket.socket, name: str) -> None:
        try:
            self._answer(stream, name)
        except (OSError, PeerLost, msgspec.MsgspecError):
            stream.close()

    def _answer(self, stream: socket.socket, name: str) -> None:
        stream.settimeout(GREETING)
        frame = receive_frame(stream, most=LONGEST_HELLO, seconds=GREETING)
        if frame.kind is not Kind.HELLO:
            raise PeerLost(f"{name} did not identify itself")
        hello = msgspec.msgpack.decode(frame.body, type=Hello)
        why = self._objection(hello)
        if why:
            send_frame(stream, Kind.REFUSED, parts=(why.encode(),))
            stream.close()
            return
        send_frame(stream, Kind.WELCOME, parts=(self._hello(""),))
        self._greet(stream, name)

    def _objection(self, hello: Hello) -> str:
        if not secrets.compare_digest(hello.secret.encode(), self._secret.encode()):
            return "the secret differs; give both engines the same --pages-secret"
        theirs = "; ".join(f"{name} {value}" for name, value in hello.layout.items())
        ours = "; ".join(f"{name} {value}" for name, value in asdict(self._layout).items())
        return "" if theirs == ours else f"pages here have [{ours}], there [{theirs}]; start both alike"


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_server((host, int(port)))
    except OSError as error:
        raise ConfigError(
            f"cannot listen for pages at {address}: {error}", remedy="give --pages-address another port"
        ) from None


def _name(where: tuple[str, int]) -> str:
    return f"{where[0]}:{where[1]}"


def wait_for(transfer: TcpPages, address: str, seconds: float) -> int:
    """Connect to a peer that may not be up yet. Raises ConfigError if it does not come up, or has
    another layout."""
    end = time.monotonic() + seconds
    while True:
        try:
            return transfer.connect(address)
        except PeerLost as error:
            if time.monotonic() > end:
                raise ConfigError(f"{error}", wanted="a prompt engine", remedy="start it, or correct --peers") from None
            time.sleep(0.2)
