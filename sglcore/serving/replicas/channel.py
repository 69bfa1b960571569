"""The channel between the frontend and an engine process: one pair of sockets, messages as msgpack.

On one machine it is a socket file in a folder that only its owner may enter. Between machines it is
TCP with CURVE keys, so that peers without the keys are ignored.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from sglcore.device.errors import ConfigError
from sglcore.serving.replicas.ipc import Address, Beat, EngineReply, EngineRequest

LINGER_MS = 2000
"""Milliseconds for which a closing socket still sends queued messages."""
WATCH_MS = 100
"""Interval at which a thread that waits for a break checks whether it should end."""
HEARTBEAT_MS, SILENCE_MS = 5_000, 30_000
"""Interval of the heartbeats of a network connection, and the time without one after which it is
broken. The sockets' own threads answer, so a long step does not count as a break."""

OF_BEATS = "b"
"""Suffix of the socket file of an engine's heartbeats."""


class EngineChannel:
    """An engine's end of a channel. Not thread-safe, except that one thread may make it and another
    use it."""

    def __init__(self, address: Address, on_lost: Callable[[], None] | None = None) -> None:
        """`on_lost` is called, on a thread of its own, when a network connection has broken:
        messages may be missing from then on. A socket file does not break."""
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        _unbounded(self._socket)
        use_keys(self._socket, address)
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        if on_lost is not None and address.endpoint.startswith("tcp:"):
            self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = HEARTBEAT_MS, SILENCE_MS
            monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._watcher = threading.Thread(
                target=_watch, args=(monitor, self._closing, on_lost), name="link", daemon=True
            )
            self._watcher.start()
        self._socket.connect(address.endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineRequest)
        self._poller: zmq.Poller | None = None

    def send(self, reply: EngineReply) -> None:
        """Queue a reply; does not wait."""
        self._socket.send(self._encoder.encode(reply), copy=True)

    def watch(self, descriptor: int) -> None:
        """Let `receive` return when a file descriptor can be read."""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, timeout_ms: int) -> list[EngineRequest]:
        """Return the requests that have arrived; waits up to `timeout_ms` for the first, or for a
        watched descriptor."""
        found = self._socket.poll(timeout_ms) if self._poller is None else self._poller.poll(timeout_ms)
        if not found:
            return []
        requests: list[EngineRequest] = []
        try:
            while True:
                requests.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return requests

    def close(self) -> None:
        """Send queued messages, then close; waits for that, at most 2 seconds."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
            self._socket.disable_monitor()
        self._socket.close(LINGER_MS)
        self._context.term()


class FrontendChannel:
    """The frontend's end of one engine's channel, on the running event loop."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, keys: tuple[bytes, bytes] | None = None) -> None:
        """`endpoint`: the address to bind (a TCP port of 0 takes a free one); `keys`, public and
        secret, turn CURVE on. Raises ConfigError."""
        try:
            self._socket = _bound(context, zmq.PAIR, endpoint, keys)
            try:
                self._beats = _bound(context, zmq.PULL, _of_beats(endpoint), keys)
            except BaseException:
                self._socket.close(0)
                raise
        except zmq.ZMQError as error:
            is_long = error.errno == errno.ENAMETOOLONG
            raise ConfigError(
                f"no channel to an engine can be opened at {endpoint}: "
                f"{'its path is too long' if is_long else error.strerror}",
                remedy="set TMPDIR to a folder with a short path"
                if is_long
                else "see what this process may open: `ulimit -n`",
            ) from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.beats: str = self._beats.getsockopt_string(zmq.LAST_ENDPOINT)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineReply)

    def send(self, request: EngineRequest) -> None:
        """Queue a request; does not wait. Requests to a process that is gone are lost."""
        self._socket.send(self._encoder.encode(request))

    async def receive(self) -> EngineReply:
        """Return the next reply. Other tasks on the loop get a turn first, however many replies are
        waiting."""
        await asyncio.sleep(0)
        return self._decoder.decode(await self._socket.recv())

    async def beat(self) -> Beat:
        """Return the engine's next heartbeat; waits for it."""
        return msgspec.msgpack.decode(await self._beats.recv(), type=Beat)

    def close(self) -> None:
        """Close at once."""
        self._socket.close(0)
        self._beats.close(0)


def use_keys(socket: zmq.Socket[Any], address: Address) -> None:
    """Turn encryption on for an engine's socket, if its address has keys."""
    if address.secret:
        socket.curve_serverkey = address.frontend.encode()
        socket.curve_publickey = address.public.encode()
        socket.curve_secretkey = address.secret.encode()


def _of_beats(endpoint: str) -> str:
    """Return the endpoint of heartbeats: a file next to the channel's, or another free port."""
    return f"{endpoint}{OF_BEATS}" if endpoint.startswith("ipc:") else f"{endpoint.rpartition(':')[0]}:0"


def _bound(
    context: zmq.asyncio.Context, kind: int, endpoint: str, keys: tuple[bytes, bytes] | None
) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    try:
        _unbounded(socket)
        if keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys
        socket.bind(endpoint)
    except BaseException:
        socket.close(0)
        raise
    return socket


def _watch(monitor: zmq.Socket[bytes], closing: threading.Event, on_lost: Callable[[], None]) -> None:
    """Report a break, until the channel closes. It polls: the event that ends a monitor may be
    lost, and a context does not end before all its sockets are closed."""
    while not closing.is_set():
        if monitor.poll(WATCH_MS):
            recv_monitor_message(monitor)
            on_lost()
    monitor.close(0)


def _unbounded(socket: zmq.Socket) -> None:
    """Remove the socket's queue limits, so that nothing is dropped: the number of admitted requests
    limits the messages in flight."""
    socket.sndhwm = 0
    socket.rcvhwm = 0


def open_channel(context: zmq.asyncio.Context, endpoint: str) -> tuple[FrontendChannel, Address]:
    """Return the frontend's end, and the address for the engine: `ipc://PATH`, or `tcp://HOST:0`
    with new keys."""
    if endpoint.startswith("ipc:"):
        channel = FrontendChannel(context, endpoint)
        return channel, Address(channel.endpoint, channel.beats)
    frontend, engine = zmq.curve_keypair(), zmq.curve_keypair()
    channel = FrontendChannel(context, endpoint, frontend)
    keys = (frontend[0].decode(), engine[0].decode(), engine[1].decode())
    return channel, Address(channel.endpoint, channel.beats, *keys)
