"""Starts the process of each rank, on this machine or on several hosts, and defines where ranks
connect."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import is_loopback
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row
from sglcore.device.choice import ChosenDevice
from sglcore.device.selection import Choice
from sglcore.engine.ranks.agreement import decisions, shared_facts
from sglcore.engine.ranks.hosts import Gathering, Joined, NodeFacts, Order, RemoteHost, host_spec
from sglcore.engine.ranks.interface import interface_of
from sglcore.engine.ranks.launch_ray import RayHosts
from sglcore.engine.ranks.rank_launch import Placement, host_and_port
from sglcore.engine.ranks.spec import RankProcess, Spawn, spec_of
from sglcore.engine.ranks.wire import Channel, listen, tcp_address
from sglcore.worker.topology import Communication, Place, Topology

SILENCES = 5
"""Missed heartbeats after which a peer counts as gone."""


@dataclass
class Team:
    """The ranks of one start, before their processes exist. `listener`: where ranks connect;
    `starts`: one function for each node, which starts the processes of its ranks without waiting
    and returns them by rank; `row`: the ledger's row; `hosts`: the other nodes; `cluster`: the Ray
    cluster that started them, if one did."""

    listener: socket.socket
    starts: list[Callable[[], dict[int, RankProcess]]]
    row: Row
    hosts: list[RemoteHost] = field(default_factory=list)
    cluster: RayHosts | None = None

    def host_of(self, rank: int) -> str:
        """Return the address of the host of a rank; empty: this machine."""
        return next((host.address for host in self.hosts if rank in host.ranks), "")

    def tie(self, found: Mapping[tuple[int, str], Channel]) -> None:
        """Hang up the channels of a node's ranks when the node is gone. `found`: all channels, by
        rank and use; called once all ranks have connected."""
        for host in self.hosts:
            host.hang_up_with([channel for (rank, _), channel in found.items() if rank in host.ranks])

    def close(self) -> None:
        """End the other nodes and their ranks, and leave the Ray cluster. Idempotent."""
        for host in self.hosts:
            host.close()
        if self.cluster is not None:
            self.cluster.close()


@dataclass(frozen=True)
class Maker:
    """Makes the `Team` of a start. `spawn` starts the process of a rank on this machine; `told`:
    the fields `epoch`, `secret` and `beat` of every RankSpec."""

    config: EngineConfig
    choice: Choice
    communication: Communication
    topology: Topology
    spawn: Spawn
    told: Mapping[str, Any]
    placement: Placement

    def here(self, stack: ExitStack) -> Team:
        """Return a team with all ranks on this machine.

        The ranks share a folder that exists, and the listener is open, as long as the stack is.
        """
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglcore-ranks-", dir=_folder())))
        listener, address = listen(home)
        stack.callback(listener.close)
        world = self.topology.world
        places = [Place(rank, self.topology, f"file://{home / 'meeting'}", rank, world) for rank in range(world)]
        return Team(listener, [partial(self._start, places, address=address)], self.placement.row("auto"))

    def across(self, stack: ExitStack, folder: Path, progress: Callable[[str, int, int], None]) -> Team:
        """Return a team with the same number of ranks on each node, when all nodes have joined.
        Waits.

        The listener is open as long as the stack is. Raises ConfigError for nodes that do not fit
        each other, and WorkerLost if some do not join in `join_timeout` seconds.
        """
        cluster = self._cluster() if self.placement.cluster else None
        with ExitStack() as undone:
            if cluster is not None:
                undone.callback(cluster.close)
            listener, host, port = self._listen("" if cluster is None else cluster.address)
            stack.callback(listener.close)
            joined = self._join(listener, f"{host}:{port}", folder, progress, cluster)
            for each in joined:
                undone.callback(each.channel.close)
            team = self._team(listener, port, joined)
            undone.pop_all()
        team.cluster = cluster
        return team

    def _cluster(self) -> RayHosts:
        """Return the Ray cluster that this host is in.

        Each host must give one CPU and one device for each of its ranks.
        """
        each = float(self.topology.world // self.placement.nodes)
        device = self.communication.cluster_resource
        return RayHosts(
            self.placement.cluster, self.placement.nodes, {"CPU": each} | ({device: each} if device else {})
        )

    def _join(
        self,
        listener: socket.socket,
        where: str,
        folder: Path,
        progress: Callable[[str, int, int], None],
        cluster: RayHosts | None,
    ) -> list[Joined]:
        """Return the other nodes, once all have joined; with a cluster, start them first. `where`:
        HOST:PORT of the listener."""
        shared, seconds = shared_facts(self.config, folder, self.choice), self.config.join_timeout

        def look(phase: str, done: int, total: int) -> None:
            progress(phase, done, total)
            if cluster is not None:
                cluster.check()

        if cluster is not None:
            cluster.begin([self._told_by_cluster(node, where) for node in range(1, self.placement.nodes)], seconds)
        return Gathering(listener, self.placement.nodes, shared, look, self._check_devices).wait(seconds, where)

    def _told_by_cluster(self, node: int, where: str) -> bytes:
        """Return the line of `host_spec` for node number `node`, which Ray starts: the leader's own
        configuration, with `device` set to the name of the leader's device without an index.
        `where`: HOST:PORT on which the leader listens."""
        config = replace(self.config, device=self.choice.package.name)
        return host_spec(config, replace(self.placement, node=node, leader=host_and_port(where)))

    def _team(self, listener: socket.socket, port: int, joined: list[Joined]) -> Team:
        """Return a team of all ranks on this node and on those that have joined."""
        silence = self.told["beat"] * SILENCES
        hosts = [RemoteHost(each, self.told["beat"], silence) for each in joined]
        address = advertised(joined)
        meeting = _free_port(address)
        own = self._places(0, self.placement.local, self.placement.neighbours, _url(address, meeting))
        network = {"own_address": address, "interface_variables": self._variables()}
        starts: list[Callable[[], dict[int, RankProcess]]] = [
            partial(self._start, own, address=tcp_address(address, port), **network)
        ]
        for each, remote in zip(joined, hosts, strict=True):
            places = self._places(each.facts.node, each.facts.local, each.facts.neighbours, "")
            plain = [place.as_plain() for place in places]
            order = Order(
                plain,
                address,
                port,
                meeting,
                **self.told,
                silence=silence,
                interface_variables=self._variables(),
                decided=decisions(self.config),
            )
            starts.append(partial(_begin, remote, order))
        met = f"node 0 is {address}, {interface_of(address) or 'on an unknown interface'}"
        asked = f"nodes {self.config.nodes}" if self.config.nodes > 1 else "auto"
        return Team(listener, starts, self.placement.row(asked, met), hosts)

    def _places(self, node: int, local: int, neighbours: int, meeting: str) -> list[Place]:
        each = self.topology.world // self.placement.nodes
        return [
            Place(node * each + place, self.topology, meeting, local * each + place, neighbours * each)
            for place in range(each)
        ]

    def _start(self, places: list[Place], **told: Any) -> dict[int, RankProcess]:
        chosen, is_host = self.choice.chosen, self.choice.package.ranks_share_device
        found: dict[int, RankProcess] = {}
        try:
            for place in places:
                found[place.rank] = self.spawn(
                    spec_of(self.config, chosen, place, is_host=is_host, **self.told, **told)
                )
        except BaseException:
            for process in found.values():
                process.kill()
            raise
        return found

    def _variables(self) -> tuple[str, ...]:
        own = self.communication.interface_variable
        return (own,) if own else ()

    def _check_devices(self, facts: NodeFacts, address: str) -> None:
        """Raise ConfigError if a node, at `address`, has fewer devices than its ranks need. The
        processor has no number of devices, so nothing is checked for it."""
        each = self.topology.world // self.placement.nodes
        chosen = ChosenDevice.decode(facts.chosen)
        last = chosen.index + facts.local * each + each
        if not self.choice.package.ranks_share_device and facts.devices and last > facts.devices:
            raise ConfigError(
                f"node {facts.node} (host {address}) needs {chosen.name} up to number {last - 1}, "
                f"and has {facts.devices}",
                remedy="fewer ranks (--tp), or more nodes",
            )

    def _listen(self, own: str) -> tuple[socket.socket, str, int]:
        """Listen for nodes, and return the socket, the host (IPv6 in brackets) and the port: at
        `own` on a free port if it is given, else at the configured leader's host and port; at all
        addresses if that host is not an address of this machine (`bindable`). Raises ConfigError.
        """
        host, port = (own, 0) if own else self.placement.leader
        try:
            listener, address = listen(None, bindable(host), port)
        except OSError as error:
            raise ConfigError(
                f"the leader cannot listen at {host}, port {port}: {error.strerror or error}",
                wanted="an address of this machine and a free port",
                remedy="--leader HOST:PORT with another port, on every host",
            ) from None
        return listener, f"[{host}]" if ":" in host else host, int(address.rpartition(":")[2])


def advertised(joined: list[Joined]) -> str:
    """Return the leader's address for all nodes: the first by which a node has reached it that is
    not loopback, else the first."""
    reached = [each.reached for each in joined]
    return next((each for each in reached if not is_loopback(each)), reached[0])


def _begin(remote: RemoteHost, order: Order) -> dict[int, RankProcess]:
    remote.begin(order)
    return dict(remote.ranks)


def bindable(host: str) -> str:
    """Return the address at which to listen for a host name: its address, if it is one of this
    machine. Empty (all addresses) if it is not, if the name has several addresses or none, or if
    the address is loopback and the name is not."""
    found = {str(each[4][0]) for each in _resolve(host)}
    if len(found) != 1:
        return ""
    address = found.pop()
    if is_loopback(address) and not is_loopback(host):
        return ""  # the name means another address elsewhere
    return address if _is_own(address) else ""


def _is_own(address: str) -> bool:
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
            return True
    except OSError:
        return False


def _resolve(host: str) -> list[Any]:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []


def _free_port(address: str) -> int:
    """Return a free port of this machine at `address`, where ranks will connect to each other; rank
    0 takes it a moment later."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as found:
        return found.getsockname()[1]


def _url(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _folder() -> str | None:
    """Return a folder in memory for files that ranks of one machine share; None if there is
    none."""
    memory = "/dev/shm"
    return memory if os.path.isdir(memory) and os.access(memory, os.W_OK) else None
