"""The reference `PageTransfer`: over TCP, one connection for each pair of engines, through host
memory.

Received pages stay on the host until the worker's own thread writes them, between two steps. Pages
for a lease that is cancelled but not drained are still written, as by a transport that writes to
memory directly; so a caller that reuses such pages too early is found out.
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
from typing import Any

import msgspec
import numpy as np

from sglcore.core.errors import ConfigError
from sglcore.engine.disaggregation.tcp_frames import Connection, Frame, Kind, Lost, receive_frame, send_frame
from sglcore.engine.timed_read import is_readable
from sglcore.worker.page_transfer import Ints, Layout, PageMemory, PeerLost, Progress, Told, Transfer

SILENCE = 20.0
"""Seconds without a frame after which a peer is lost."""
GREETING = 5.0
"""Seconds that each side may take to greet on a new connection."""
LONGEST_HELLO = 1 << 16
"""Maximum number of bytes of a greeting's body."""


class Hello(msgspec.Struct):
    """The body of HELLO and WELCOME: the sender's page `layout`, the fields of its `Layout` by
    name, and in HELLO the `secret`, which is empty in WELCOME."""

    layout: dict[str, str | int]
    secret: str = ""


@dataclass(slots=True)
class _Lease:
    peer: int
    pages: frozenset[int]
    is_drained: bool = False


class TcpPages:
    """A `PageTransfer` over TCP. `address`: HOST:PORT where it listens; empty if it does not
    listen."""

    def __init__(
        self, memory: PageMemory, layout: Layout, listens: str = "", secret: str = "", silence: float = SILENCE
    ) -> None:
        """`memory` and `layout`: this engine's pages. `listens`: HOST:PORT (port 0 takes a free
        one); empty: only `connect` makes connections. `secret`: a peer that connects must send the
        same. `silence`: seconds without a frame after which a peer is lost. Raises ConfigError if
        it cannot listen."""
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
        """Whether something has arrived, or a transfer has ended, since the last `receive`, which
        may have events to return or pages to write."""
        return bool(self._inbox) or is_readable(self._awake)

    @property
    def num_leases(self) -> int:
        """Number of leases that this engine offered and that were not ended (`end`)."""
        return len(self._leases)

    def connect(self, address: str) -> int:
        """Connect to a prompt engine, exchange greetings, and return the peer's number. Waits at
        most GREETING seconds for the connection and again for the answer. Raises PeerLost if none
        answers, and ConfigError if it refuses the layout or the secret."""
        host, _, port = address.rpartition(":")
        with ExitStack() as stack:
            try:
                where = host.strip("[]"), int(port)
                stream = stack.enter_context(socket.create_connection(where, timeout=GREETING))
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
        """Return a peer's address HOST:PORT: the text given to `connect`, or for a peer that
        connected, where it did so from; "peer N" after it is lost."""
        found = self._connections.get(peer)
        return f"peer {peer}" if found is None else found.name

    def tell(self, peer: int, body: bytes) -> None:
        """Send a message after the page frames that are queued; dropped if the peer is lost. Does
        not wait."""
        self._queue(peer, Kind.TOLD, parts=(body,))

    def receive(self, seconds: float = 0.0) -> list[Told]:
        """Write the pages that arrived to the page memory, and return all other events, perhaps [].
        Waits up to `seconds` for the first item."""
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
        """Return the number of a new lease, under which `peer` may write to `pages`, int32; if the
        peer is lost, it is drained at once. The caller sends the number to the peer in a
        message."""
        self._offered += 1
        self._leases[self._offered] = _Lease(peer, frozenset(pages.tolist()), peer not in self._connections)
        return self._offered

    def cancel(self, lease: int) -> None:
        """Ask the writer of a lease to stop; does nothing for an unknown or drained lease. Does not
        wait: the frame DRAINED answers after everything that the writer has written."""
        found = self._leases.get(lease)
        if found is not None and not found.is_drained:
            self._queue(found.peer, Kind.CANCEL, lease=lease)

    def end(self, lease: int) -> None:
        """Forget a lease. If pages arrive for it later, the connection to their sender is
        closed."""
        self._leases.pop(lease, None)

    def drained(self, lease: int) -> bool:
        """Return whether no more pages can arrive for a lease: its writer's DRAINED frame has
        arrived, which it sends after its pages, or the connection is closed and all its frames are
        processed. True for an unknown lease."""
        found = self._leases.get(lease)
        return found is None or found.is_drained

    def write(
        self, peer: int, lease: int, source: Ints, target: Ints, layers: tuple[int, int] | None = None
    ) -> Transfer:
        """Read this engine's pages `source` at once, which waits for the device, and queue them for
        the pages `target` of the peer's `lease`, in pairs; sending does not wait. `layers` (from,
        to): only layers from..to - 1; None: all. Returns the transfer; it has FAILED if the peer is
        lost."""
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
        """The read end of a pipe, readable while something has arrived."""
        return self._awake

    def close(self) -> None:
        """Disconnect from all peers, stop listening, and free all resources. Idempotent."""
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
        """Register and start the connection of a peer after the greetings. Returns the peer's new
        number. Raises PeerLost if this transfer is closed."""
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
    host = host.strip("[]")
    try:
        return socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(
            f"cannot listen for pages at {address}: {error}", remedy="give --pages-address another port"
        ) from None


def _name(where: tuple[Any, ...]) -> str:
    """Return HOST:PORT of a socket's address, with an IPv6 host in brackets."""
    host, port = where[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def wait_for(transfer: TcpPages, address: str, seconds: float) -> int:
    """Connect to `address` and return the peer's number; tries for `seconds` while no engine
    answers there. Raises ConfigError if none answers in that time, or if it refuses."""
    end = time.monotonic() + seconds
    while True:
        try:
            return transfer.connect(address)
        except PeerLost as error:
            if time.monotonic() > end:
                raise ConfigError(f"{error}", wanted="a prompt engine", remedy="start it, or correct --peers") from None
            time.sleep(0.2)
