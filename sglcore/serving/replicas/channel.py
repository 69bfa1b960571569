"""The channel between the frontend and an engine process: a pair of ZeroMQ sockets, with messages
as msgpack.

On one machine it is a socket file in a folder that only its owner may enter. Between machines it is
TCP with CURVE encryption, so that peers without the keys are ignored.
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

from sglcore.core.errors import ConfigError
from sglcore.serving.replicas.ipc import Address, Beat, EngineReply, EngineRequest

LINGER_MS = 2000
"""Milliseconds for which a closing socket still sends queued messages."""
WATCH_MS = 100
"""Milliseconds between two checks of a watching thread whether it should end."""
HEARTBEAT_MS, SILENCE_MS = 5_000, 30_000
"""Milliseconds between heartbeats of a network connection, and without one until the connection
counts as broken. ZeroMQ's own threads answer, so a long step does not count as a break."""

OF_BEATS = "b"
"""What is appended to the path of a channel's socket file for the file of the engine's
heartbeats."""


class EngineChannel:
    """The engine's end of a channel, for messages; heartbeats have a socket of their own
    (`Heartbeat`). Not thread-safe, except that one thread may make it and another use it."""

    def __init__(self, address: Address, on_lost: Callable[[], None] | None = None) -> None:
        """Connect to the frontend at `address`; does not wait. `on_lost` is called, on a thread of
        its own, when a network connection has broken: messages may be missing from then on. A
        socket file does not break."""
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
        """Queue a reply; does not wait, also if the frontend is not there yet. The queue has no
        limit."""
        self._socket.send(self._encoder.encode(reply), copy=True)

    def watch(self, descriptor: int) -> None:
        """Let `receive` also return when this file descriptor can be read; one descriptor at most,
        a later one replaces it."""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, timeout_ms: int) -> list[EngineRequest]:
        """Return the requests that have arrived, in order; waits up to `timeout_ms` milliseconds
        for the first, or for the watched descriptor. Empty if there are none."""
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
        """Close after the queued messages are sent; waits for that, at most 2 seconds."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
            self._socket.disable_monitor()
        self._socket.close(LINGER_MS)
        self._context.term()


class FrontendChannel:
    """The frontend's end of one engine's channel, used on the running event loop. `endpoint` and
    `beats`: the addresses that it has bound, for messages and for heartbeats."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, keys: tuple[bytes, bytes] | None = None) -> None:
        """`endpoint`: the ZeroMQ address to bind (TCP port 0 takes a free one); `keys`: the
        frontend's public and secret CURVE key (None: no encryption). Raises ConfigError if it
        cannot be bound."""
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
        """Queue a request; does not wait. Requests to a process that has ended are lost."""
        self._socket.send(self._encoder.encode(request))

    async def receive(self) -> EngineReply:
        """Return the engine's next reply; waits for it, without a time limit. Other tasks on the
        loop run first, also if replies are waiting."""
        await asyncio.sleep(0)
        return self._decoder.decode(await self._socket.recv())

    async def beat(self) -> Beat:
        """Return the engine's next heartbeat; waits for it, without a time limit."""
        return msgspec.msgpack.decode(await self._beats.recv(), type=Beat)

    def close(self) -> None:
        """Close both sockets at once; queued messages are dropped."""
        self._socket.close(0)
        self._beats.close(0)


def use_keys(socket: zmq.Socket[Any], address: Address) -> None:
    """Turn CURVE encryption on for an engine's socket if its address has keys; else change nothing.
    Call it before connecting."""
    if address.secret:
        socket.curve_serverkey = address.frontend.encode()
        socket.curve_publickey = address.public.encode()
        socket.curve_secretkey = address.secret.encode()


def _of_beats(endpoint: str) -> str:
    """Return the endpoint to bind for heartbeats: a socket file next to the channel's, or another
    free TCP port."""
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
    """Call `on_lost` for each break of the connection that `monitor` reports, until `closing` is
    set; runs on a thread of its own. It polls: the event that ends a monitor may be lost, and a
    context does not end before all its sockets are closed."""
    while not closing.is_set():
        if monitor.poll(WATCH_MS):
            recv_monitor_message(monitor)
            on_lost()
    monitor.close(0)


def _unbounded(socket: zmq.Socket) -> None:
    """Remove the queue limits of a socket, so that nothing is dropped: the number of admitted
    requests limits the messages."""
    socket.sndhwm = 0
    socket.rcvhwm = 0


def open_channel(context: zmq.asyncio.Context, endpoint: str) -> tuple[FrontendChannel, Address]:
    """Return the frontend's end of a new channel, and the address for the engine. `endpoint`:
    `ipc://PATH`, or `tcp://HOST:0`, for which new keys are made; the address has them. Raises
    ConfigError if it cannot be bound."""
    if endpoint.startswith("ipc:"):
        channel = FrontendChannel(context, endpoint)
        return channel, Address(channel.endpoint, channel.beats)
    frontend, engine = zmq.curve_keypair(), zmq.curve_keypair()
    channel = FrontendChannel(context, endpoint, frontend)
    keys = (frontend[0].decode(), engine[0].decode(), engine[1].decode())
    return channel, Address(channel.endpoint, channel.beats, *keys)
