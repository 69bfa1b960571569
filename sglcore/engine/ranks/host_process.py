"""The process of a node other than the first: it connects to the leader, starts the ranks that the
leader orders, and ends with them.

It serves no requests and loads no model itself. If the leader is gone or silent, the node ends its
ranks: a model that lacks a part cannot run.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from sglcore.config.engine_config import EngineConfig, config_of_plain, plain_config
from sglcore.config.server_config import is_loopback
from sglcore.core.errors import ConfigError, SglcoreError, WorkerLost
from sglcore.core.ledger import DecisionLedger
from sglcore.device.choice import ChosenDevice
from sglcore.engine.process_end import leave
from sglcore.engine.ranks.agreement import shared_facts, with_decisions
from sglcore.engine.ranks.hosts import EPOCH, HostSpec, NodeFacts, Order, spec_at
from sglcore.engine.ranks.parent import end_with_parent
from sglcore.engine.ranks.rank_launch import Placement
from sglcore.engine.ranks.rank_process import LEADER_GONE
from sglcore.engine.ranks.spec import RankProcess, Spawn, spawn_local
from sglcore.engine.ranks.wire import Channel, Frame, Gone, Kind, connect, tcp_address
from sglcore.engine.start import choose, fetched, no_progress
from sglcore.engine.timed_read import is_readable

TRY_EVERY = 0.5
"""Seconds between two attempts to reach a leader that is not up yet."""
ONE_TRY = 5.0
"""Seconds that one attempt may take."""
LOOK_EVERY = 0.05
"""Seconds between two checks whether ranks have ended."""
ENDING = 10.0
"""Seconds that ranks have to end after their leader is gone: one that it has closed frees its
device first, and any other ends at once."""
FAILED = 1
"""The exit code of a node after one of its ranks has failed."""
FINISH = 40.0
"""Default number of seconds that a node continues after a signal told it to end."""

log = logging.getLogger("sglcore.ranks")
Prepare = Callable[[], tuple[EngineConfig, Path]]


@dataclass(slots=True)
class Stopping:
    """Whether a signal told a node to end (`is_asked`), and whether the node has ranks
    (`is_holding`).

    A node with ranks continues until its leader, which was also told to end, has drained, or for
    `finish` seconds.
    """

    is_asked: bool = False
    is_holding: bool = False
    finish: float = FINISH


@dataclass(frozen=True, slots=True)
class Node:
    """A node other than the first, before it joins. `prepare` returns its configuration and the
    model's folder or GGUF file, which may take long; `join_timeout`: seconds to reach the leader,
    and again to get its order; `spawn` starts the process of a rank."""

    placement: Placement
    prepare: Prepare
    join_timeout: float
    spawn: Spawn = spawn_local
    stopping: Stopping = field(default_factory=Stopping)

    def follow(self) -> int:
        """Join the leader, start the ordered ranks, and wait until they have ended. Returns the
        exit code: 0 if the leader closed them, LEADER_GONE, or FAILED. Raises WorkerLost if no
        leader, or no order of it, is there in time, and ConfigError if this node cannot be part of
        the group."""
        host, port = self.placement.leader
        channel = Channel(reach(host, port, self.join_timeout), EPOCH)
        try:
            config, chosen = self._introduce(channel)
            order = self._order(channel)
            if order is None:
                return LEADER_GONE
            config = with_decisions(config, order.decided)
            leader, own = channel.addresses
            if is_loopback(own):  # the leader's own machine: other nodes know it by this address
                leader = own = order.address
            ranks: dict[int, RankProcess] = {}
            self.stopping.is_holding = True
            try:
                for each in order.ranks:
                    spec = self._spec(order, each, leader, own, config, chosen)
                    ranks[each["rank"]] = self.spawn(spec)
                return Following(channel, ranks, order, self.stopping).run()
            finally:
                end_ranks(ranks)
                self.stopping.is_holding = False
        finally:
            channel.close()

    def _introduce(self, channel: Channel) -> tuple[EngineConfig, tuple[ChosenDevice, bool]]:
        """Report this node's devices and facts to the leader, or why it cannot take part. Returns
        the configuration, the chosen device, and whether that device is the processor."""
        try:
            config, folder = self.prepare()
            choice = choose(config, DecisionLedger())
            at, package = self.placement, choice.package
            devices = 0 if package.ranks_share_device else len(choice.report.devices)
            facts = NodeFacts(
                at.node,
                choice.chosen.encode(),
                devices,
                at.local,
                at.neighbours,
                shared_facts(config, folder, choice),
            )
            channel.send(Kind.HELLO, msgspec.msgpack.encode(facts))
        except SglcoreError as error:
            if not isinstance(error, Gone):
                channel.send(Kind.FAILED, str(error).encode())
            raise
        return config, (choice.chosen, package.ranks_share_device)

    def _order(self, channel: Channel) -> Order | None:
        """Return the leader's order, which it sends once all nodes have joined. None: the leader
        ended before. Raises ConfigError if the leader refuses this node, and WorkerLost after
        `join_timeout` seconds."""
        channel.wait_at_most(self.join_timeout)
        host, port = self.placement.leader
        try:
            frame = channel.receive()
        except Gone:
            log.error("the leader at %s, port %d ended before all nodes had joined", host, port)
            return None
        except TimeoutError:
            raise WorkerLost(
                f"the leader at {host}, port {port} has not found all nodes in {self.join_timeout:.0f} s",
                remedy="look at the output of the leader and of the other nodes, or raise --join-timeout",
            ) from None
        if frame.kind is Kind.FAILED:
            raise ConfigError(f"the leader at {host}:{port} refuses: {frame.body.decode(errors='replace')}")
        return msgspec.msgpack.decode(frame.body, type=Order)

    def _spec(
        self,
        order: Order,
        place: dict[str, Any],
        leader: str,
        own: str,
        config: EngineConfig,
        device: tuple[ChosenDevice, bool],
    ) -> Any:
        chosen, is_host = device
        chosen = chosen if is_host else replace(chosen, index=chosen.index + place["local"])
        name = chosen.name if is_host else f"{chosen.name}:{chosen.index}"
        return spec_at(order, place, leader, own, plain_config(replace(config, device=name)), chosen.encode())


class Following:
    """The running ranks of this node and the channel to the leader; one thread uses it. `ending`:
    seconds that ranks have to end by themselves after the leader is gone."""

    def __init__(
        self,
        channel: Channel,
        ranks: dict[int, RankProcess],
        order: Order,
        stopping: Stopping,
        ending: float = ENDING,
    ) -> None:
        self._channel, self._ranks, self._order, self._stopping = channel, ranks, order, stopping
        self._ending = ending
        self._codes: dict[int, int] = {}
        self._stops_at: float | None = None

    def run(self) -> int:
        """Exchange heartbeats with the leader until all ranks have ended, the leader closes them,
        or it is gone. Returns the exit code: 0 if all ranks ended without error, FAILED if one
        failed or a signal told the node to end, LEADER_GONE if the leader is gone."""
        for rank, process in self._ranks.items():
            self._say(Kind.STARTED, [rank, process.pid])
        heard = spoke = time.monotonic()
        self._channel.wait_at_most(self._order.silence)
        while not self._have_ended():
            now = time.monotonic()
            if now - spoke >= self._order.beat:
                spoke = now
                self._say(Kind.BEAT, None)
            if now - heard >= self._order.silence:
                log.error("the leader has sent nothing for %.1f s: its ranks here end", now - heard)
                return LEADER_GONE
            if self._must_stop(now):
                log.error("stopping: the ranks here end, and so does the model")
                return FAILED
            try:
                frame = self._next()
            except (Gone, TimeoutError):
                return self._left_alone()
            if frame is not None:
                heard = time.monotonic()
                if frame.kind is Kind.CLOSE:
                    return self._close()
        return self._outcome()

    def _next(self) -> Frame | None:
        return self._channel.receive() if is_readable(self._channel, LOOK_EVERY) else None

    def _have_ended(self) -> bool:
        """Report each new end of a rank to the leader; returns whether all have ended."""
        for rank, process in self._ranks.items():
            if rank not in self._codes and (code := process.poll()) is not None:
                self._codes[rank] = code
                self._say(Kind.ENDED, [rank, code])
        return len(self._codes) == len(self._ranks)

    def _must_stop(self, now: float) -> bool:
        """Return whether the node must end now, at the time `now`.

        After a signal told it to end, it continues for `finish` seconds: the leader was also told,
        and needs the ranks until it has drained.
        """
        if not self._stopping.is_asked:
            return False
        if self._stops_at is None:
            self._stops_at = now + self._stopping.finish
        return now >= self._stops_at

    def _close(self) -> int:
        """Kill the ranks that still run, as the leader ordered, and return the exit code."""
        end_ranks(self._ranks)
        self._have_ended()
        return self._outcome()

    def _left_alone(self) -> int:
        """Wait up to `ending` seconds for the ranks to end after the leader is gone, and return the
        exit code: 0 if all ended without error, because the leader may have closed them a moment
        before."""
        end = time.monotonic() + self._ending
        while not self._have_ended() and time.monotonic() < end:
            time.sleep(LOOK_EVERY)
        if self._have_ended() and not any(self._codes.values()):
            return 0
        log.error("the leader is gone: its ranks here end")
        return LEADER_GONE

    def _outcome(self) -> int:
        codes = {code for code in self._codes.values() if code}
        return LEADER_GONE if codes == {LEADER_GONE} else FAILED if codes else 0

    def _say(self, kind: Kind, values: Any) -> None:
        try:
            self._channel.send(kind, msgspec.msgpack.encode(values))
        except Gone:
            pass  # a channel that the leader has closed is reported by the next read


def end_ranks(ranks: dict[int, RankProcess]) -> None:
    """Kill the ranks that still run, and wait up to 10 s for the end of each. Raises the exception
    of `RankProcess.wait` for one that has not ended then."""
    for process in ranks.values():
        if process.poll() is None:
            process.kill()
    for process in ranks.values():
        process.wait(10.0)


def reach(host: str, port: int, seconds: float) -> socket.socket:
    """Return a stream to the leader; tries until the leader listens. Raises WorkerLost after
    `seconds`."""
    end = time.monotonic() + seconds
    while True:
        try:
            return connect(tcp_address(host, port), min(ONE_TRY, max(end - time.monotonic(), 0.1)))
        except OSError as error:
            if time.monotonic() + TRY_EVERY < end:
                time.sleep(TRY_EVERY)
                continue
            raise WorkerLost(
                f"no leader could be reached at {host}, port {port} in {seconds:.0f} s: {error}{_resolved(host)}",
                wanted="node 0 of the same model, listening there",
                remedy="start it, correct the address that is given for it, or raise --join-timeout",
            ) from None


def _resolved(host: str) -> str:
    """Return a note with the addresses of a host name on this machine, for an error: a name that
    resolves to the machine itself is the most common mistake. Empty for an address in digits, or if
    there is none."""
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)})
    except OSError:
        return ""
    return "" if found == [host] else f"; {host} is {', '.join(found)} here"


def follow(node: Node, *, restart: bool = False) -> int:
    """Run `Node.follow` and return its exit code; SIGTERM and SIGINT end it. With `restart`, run it
    again until it returns 0 or a signal has told it to end; each run waits `join_timeout` for the
    leader. Exceptions of `Node.follow` are raised."""
    with _signals(node.stopping):
        while True:
            code = node.follow()
            if code == 0 or not restart or node.stopping.is_asked:
                return code
            log.warning("waiting for the leader to start again")


@contextmanager
def _signals(stopping: Stopping) -> Iterator[None]:
    """Handle SIGTERM and SIGINT inside the context: the first one sets `is_asked`; a second one
    raises KeyboardInterrupt, and so does the first while the node has no ranks."""

    def told(number: int, frame: object) -> None:
        if stopping.is_asked or not stopping.is_holding:
            raise KeyboardInterrupt
        stopping.is_asked = True

    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    """Run a node with a HostSpec as one line of JSON on standard input, and return its exit code;
    the process ends when standard input closes."""
    with open(0, "rb", closefd=False) as given:
        spec = msgspec.json.decode(given.readline(), type=HostSpec)
    logging.basicConfig(level=logging.INFO, format=f"%(levelname)s node {spec.placement['node']}: %(message)s")
    config = config_of_plain(spec.config)
    placement = Placement(**{**spec.placement, "leader": tuple(spec.placement["leader"])})
    node = Node(placement, lambda: fetched(config, no_progress), config.join_timeout)
    end_with_parent(LEADER_GONE)
    try:
        return node.follow()
    except SglcoreError as error:
        log.error("%s", error)
        return error.exit_code


if __name__ == "__main__":
    leave(main())
