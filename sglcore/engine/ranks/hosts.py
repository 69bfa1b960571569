"""The leader's side of ranks on several hosts: it waits for the other nodes, compares their facts
with its own, orders the ranks that each starts, and detects, at once or after some silence, that a
node is gone.

A node has one channel to the leader. The ranks that it starts have channels of their own, as the
ranks on the leader's machine have.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from sglcore.config.engine_config import EngineConfig, plain_config
from sglcore.core.errors import ConfigError, SglcoreError, WorkerLost
from sglcore.engine.ranks.agreement import differences
from sglcore.engine.ranks.rank_launch import Placement
from sglcore.engine.ranks.spec import HOST_GONE, RankSpec
from sglcore.engine.ranks.wire import LONGEST_HELLO, Channel, Frame, Gone, Kind
from sglcore.engine.timed_read import is_readable

HELLO_SECONDS = 5.0
"""Seconds that a frame may take after its first byte."""
ANSWER_SECONDS = 2.0
"""Seconds that a node may take to report that its ranks have ended after it was told to end them; a
node without contact ends them by itself."""
LOOK_EVERY = 0.1
EPOCH = 0
"""The epoch of the channels of nodes. The epoch of the ranks is sent over them."""


class NodeFacts(msgspec.Struct, frozen=True):
    """A node's report: its number, its chosen device as `ChosenDevice.encode` writes it, its number
    of devices (0: the processor), its index among the nodes of its machine and their number, and
    the facts that all nodes must have in common."""

    node: int
    chosen: str
    devices: int
    local: int
    neighbours: int
    shared: dict[str, Any]


class Order(msgspec.Struct, frozen=True):
    """The leader's order to a node to start its ranks: their places, where they connect, the
    secret, and the times of heartbeats. The configuration is the node's own, except for
    `decided`."""

    ranks: list[dict[str, Any]]
    """The `Place` of each rank of the node, as plain values."""
    address: str
    """The leader's address, by which most nodes reach it."""
    port: int
    """The leader's port for the channels of ranks."""
    meeting_port: int
    """The leader's port where ranks connect to each other for collectives."""
    epoch: int
    """The number of this start of the ranks."""
    secret: str
    """The secret that a rank sends to be admitted."""
    beat: float
    """Seconds between two heartbeats."""
    silence: float
    """Seconds without a heartbeat after which the leader is considered gone."""
    interface_variables: tuple[str, ...]
    """Names of environment variables that get the name of the network interface."""
    decided: dict[str, Any]
    """The leader's `agreement.decisions`."""


class HostSpec(msgspec.Struct, frozen=True):
    """The specification of a node that the leader itself starts, through Ray: `plain_config` of the
    configuration, and the fields of the `Placement`."""

    config: dict[str, Any]
    placement: dict[str, Any]


def host_spec(config: EngineConfig, placement: Placement) -> bytes:
    """Return a HostSpec as one line of JSON, for the standard input of `host_process.main`."""
    return msgspec.json.encode(HostSpec(plain_config(config), asdict(placement))) + b"\n"


@dataclass(slots=True)
class Joined:
    """A node that has joined: its facts, its channel, its address, and the leader's address by
    which it reached the leader."""

    facts: NodeFacts
    channel: Channel
    address: str
    reached: str


@dataclass(slots=True)
class Remote:
    """The process of a rank on another host: a `RankProcess` whose state the host reports. `code`:
    its exit code; None: it runs."""

    host: RemoteHost
    pid: int = 0
    code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code that the host has reported; None: it has reported no end. Does not
        wait."""
        return self.code

    def wait(self, timeout: float) -> int:
        """Wait until the host reports that the process has ended, and return the exit code. Raises
        TimeoutError after `timeout` seconds, or earlier if the host was told to end it and does not
        answer in ANSWER_SECONDS."""
        return self.host.wait_for(self, timeout)

    def kill(self) -> None:
        """Tell the host to end all its ranks; does not wait. Idempotent."""
        self.host.end()


class RemoteHost:
    """The leader's view of one other node: its ranks, and a thread that listens to it."""

    def __init__(self, joined: Joined, beat: float, silence: float) -> None:
        """`beat`: seconds between two heartbeats to the node; `silence`: seconds without a message
        after which the node is gone."""
        self.address = joined.address
        self.ranks: dict[int, Remote] = {}
        self._channel, self._beat, self._silence = joined.channel, beat, silence
        self._changed, self._told_to_end = threading.Condition(), 0.0
        self._of_ranks: list[Channel] = []
        self._is_gone = False

    def begin(self, order: Order) -> None:
        """Order the node to start its ranks; does not wait for them. Called once. Raises Gone."""
        self.ranks = {each["rank"]: Remote(self) for each in order.ranks}
        self._channel.send(Kind.ORDER, msgspec.msgpack.encode(order))
        threading.Thread(target=self._run, name=f"host {self.address}", daemon=True).start()

    def hang_up_with(self, channels: Sequence[Channel]) -> None:
        """Set the channels of the node's ranks: they are hung up when the node is gone, at once if
        it is gone already."""
        with self._changed:
            self._of_ranks = list(channels)
            is_gone = self._is_gone
        if is_gone:
            self._lose()

    def end(self) -> None:
        """Tell the node to end its ranks; does not wait. Idempotent."""
        with self._changed:
            if self._told_to_end:
                return
            self._told_to_end = time.monotonic()
        self._say(Kind.CLOSE)

    def wait_for(self, rank: Remote, timeout: float) -> int:
        """Return the exit code of one of the node's ranks; waits for it. Raises TimeoutError after
        `timeout` seconds, or ANSWER_SECONDS after the node was told to end its ranks, whichever is
        earlier."""
        end = time.monotonic() + timeout
        with self._changed:
            while rank.code is None:
                limit = min(end, self._told_to_end + ANSWER_SECONDS) if self._told_to_end else end
                if (rest := limit - time.monotonic()) <= 0:
                    raise TimeoutError
                self._changed.wait(min(rest, LOOK_EVERY))
            return rank.code

    def close(self) -> None:
        """Tell the node to end its ranks and close its channel, so that the node ends.
        Idempotent."""
        self.end()
        self._channel.hang_up()

    def _run(self) -> None:
        try:
            with suppress(Gone, TimeoutError, OSError, ValueError):  # closed here, or there
                self._listen()
        finally:
            self._lose()

    def _listen(self) -> None:
        """Send heartbeats and take what the node says, until it has been silent for too long."""
        heard, spoke = time.monotonic(), 0.0
        self._channel.wait_at_most(HELLO_SECONDS)
        while time.monotonic() - heard < self._silence:
            if time.monotonic() - spoke >= self._beat:
                spoke = time.monotonic()
                self._say(Kind.BEAT)
            if is_readable(self._channel, min(self._beat, LOOK_EVERY)):
                self._take(self._channel.receive())
                heard = time.monotonic()

    def _take(self, frame: Frame) -> None:
        if frame.kind not in (Kind.STARTED, Kind.ENDED):
            return
        rank, value = msgspec.msgpack.decode(frame.body)
        with self._changed:
            if frame.kind is Kind.STARTED:
                self.ranks[rank].pid = value
            else:
                self.ranks[rank].code = value
            self._changed.notify_all()

    def _lose(self) -> None:
        """Mark the ranks of the node that have not ended as HOST_GONE, wake the callers that wait
        for them, and hang up their channels."""
        with self._changed:
            self._is_gone = True
            for rank in self.ranks.values():
                rank.code = HOST_GONE if rank.code is None else rank.code
            self._changed.notify_all()
            channels = list(self._of_ranks)
        for channel in channels:
            channel.hang_up()

    def _say(self, kind: Kind) -> None:
        try:
            self._channel.send(kind)
        except Gone:
            self._channel.hang_up()


@dataclass
class Gathering:
    """Waits until nodes 1..`nodes` - 1 have joined a leader. A node that does not fit ends the
    start, on both sides."""

    listener: socket.socket
    """The socket on which the leader listens for nodes."""
    nodes: int
    """Number of nodes, the leader included."""
    shared: Mapping[str, Any]
    """The leader's `agreement.shared_facts`."""
    progress: Callable[[str, int, int], None]
    """Reports the phase, the number of nodes that have joined, and the number of nodes."""
    check: Callable[[NodeFacts, str], None]
    """`check(facts, address)` raises ConfigError for a node that has too few devices."""
    found: dict[int, Joined] = field(default_factory=dict)
    """The nodes that joined, by number."""
    _waiting: list[Channel] = field(default_factory=list)
    """Connections that have not sent a whole frame yet."""
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    """Waits for the listener and for these connections."""

    def wait(self, seconds: float, where: str) -> list[Joined]:
        """Return all nodes but the leader, in the order of their numbers, once all have joined.
        Called once. `where`: HOST:PORT of the listener, for errors. Raises ConfigError for a node
        that does not fit, and WorkerLost if some are missing after `seconds`."""
        self._selector.register(self.listener, selectors.EVENT_READ)
        end = time.monotonic() + seconds
        try:
            while len(self.found) < self.nodes - 1:
                self.progress("waiting for other hosts", len(self.found) + 1, self.nodes)
                for key, _ in self._selector.select(LOOK_EVERY):
                    self._accept() if key.data is None else self._hear(*key.data)
                if time.monotonic() > end:
                    raise self._missing(seconds, where)
        except SglcoreError as error:
            self._refuse(error)
            raise
        finally:
            self._selector.close()
            for channel in self._waiting:
                channel.close()
        return [self.found[node] for node in sorted(self.found)]

    def _accept(self) -> None:
        stream, _ = self.listener.accept()
        channel = Channel(stream, EPOCH)
        try:
            addresses = channel.addresses
        except OSError:  # it has left again
            channel.close()
            return
        channel.wait_at_most(HELLO_SECONDS)
        self._waiting.append(channel)
        self._selector.register(channel, selectors.EVENT_READ, (channel, *addresses))

    def _hear(self, channel: Channel, address: str, reached: str) -> None:
        """Read the first frame of a new connection.

        A peer that is no node is disconnected. Raises ConfigError if the node failed or does not
        fit the others.
        """
        self._selector.unregister(channel)
        self._waiting.remove(channel)
        try:
            frame = channel.receive(LONGEST_HELLO)
            if frame.kind is Kind.FAILED:
                channel.close()
                raise ConfigError(f"host {address}: {frame.body.decode(errors='replace')}")
            facts = msgspec.msgpack.decode(frame.body, type=NodeFacts)
        except (Gone, TimeoutError, ValueError, msgspec.DecodeError):
            channel.close()
            return
        joined = Joined(facts, channel, address, reached)
        try:
            self._check(joined)
        except ConfigError:
            self.found[-1] = joined  # so that the error is sent to it, too
            raise
        self.found[facts.node] = joined

    def _check(self, joined: Joined) -> None:
        node, address = joined.facts.node, joined.address
        if not 0 < node < self.nodes:
            raise ConfigError(
                f"host {address} says that it is node {node} of {self.nodes}", remedy="correct --node-rank"
            )
        if (other := self.found.get(node)) is not None:
            raise ConfigError(
                f"hosts {other.address} and {address} both say that they are node {node}", remedy="correct --node-rank"
            )
        if unlike := differences(self.shared, joined.facts.shared):
            raise ConfigError(
                f"node 0 and node {node} (host {address}) differ: {'; '.join(unlike)}",
                wanted="the same on both",
                remedy="start every host with the same arguments, versions and files",
            )
        self.check(joined.facts, address)

    def _missing(self, seconds: float, where: str) -> WorkerLost:
        missing = [node for node in range(1, self.nodes) if node not in self.found]
        return WorkerLost(
            f"of {self.nodes} nodes {', '.join(map(str, missing))} did not join at {where} in {seconds:.0f} s",
            wanted="the same command on every host, and a network route from each to this address and port",
            remedy="look at the output of the missing nodes, or raise --join-timeout",
        )

    def _refuse(self, error: SglcoreError) -> None:
        for joined in self.found.values():
            try:
                joined.channel.send(Kind.FAILED, str(error).encode())
            except Gone:
                pass
            joined.channel.close()


def spec_at(
    order: Order, place: Mapping[str, Any], leader: str, own: str, config: dict[str, Any], chosen: str
) -> RankSpec:
    """Return the spec of a rank that a node starts. `place`: one of `order.ranks`; `leader`: the
    leader's address as this node reaches it; `own`: the node's address; `config`: the node's plain
    configuration; `chosen`: the rank's encoded device."""
    host = f"[{leader}]" if ":" in leader else leader
    return RankSpec(
        config=config,
        chosen=chosen,
        place={**place, "meeting": f"tcp://{host}:{order.meeting_port}"},
        address=f"tcp:{leader}:{order.port}",
        epoch=order.epoch,
        secret=order.secret,
        beat=order.beat,
        own_address=own,
        interface_variables=order.interface_variables,
    )
