"""Which node of a model this process is, from flags or from a launcher's environment variables.

A *node* is what a launcher starts: a host, or with torchrun one process of a host. Each node has
the same number of consecutive ranks; node 0 has the leader and the server. Nothing here opens a
socket.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec

from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row

LEADER_PORT = 29517
"""The leader's port if the launcher gives an address without a port."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
WORKER_SET = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
"""The variables of torchrun, and of Kubernetes' LeaderWorkerSet."""
CLUSTER = "RAY_ADDRESS"
WAYS = "--node-rank R --leader HOST:PORT on each host, torchrun, a LeaderWorkerSet, or --leader ray"


@dataclass(frozen=True, slots=True)
class Placement:
    """Which node this process is, of how many, where the leader listens, and how this is known;
    `find_placement` makes it."""

    launcher: str
    """The launcher's name, for messages."""
    reason: str
    """How the values were found, for messages."""
    nodes: int = 1
    """Number of nodes."""
    node: int = 0
    """The number of this node, from 0."""
    leader: tuple[str, int] = ("", 0)
    """Host and port where the leader listens for nodes. Empty and 0: not known, or not needed."""
    local: int = 0
    """The index of this node among the nodes of this machine, from 0."""
    neighbours: int = 1
    """Number of nodes on this machine."""
    cluster: str = ""
    """The address of the Ray cluster that starts the other nodes, auto or local; empty: Ray does
    not."""
    restarter: str = ""
    """What restarts all nodes when one ends, and by which option; empty: nothing."""

    def row(self, requested: str, met: str = "") -> Row:
        """Return the ledger's row. `requested`: what the configuration says; `met`: how the hosts
        reach each other."""
        where = self.launcher if self.nodes == 1 else f"{self.nodes} nodes by {self.launcher}"
        return Row("placement", requested, where, f"{self.reason}{met and f'; {met}'}", "--nodes 1, or " + WAYS)


ALONE = Placement("this machine", "one host is requested, and no launcher's variables are set")


def find_placement(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> Placement:
    """Return the placement of this process, from the first of these that is given: `--node-rank`,
    `--leader ray`, a launcher's variables. Otherwise it is one host, or with `nodes` above 1 Ray,
    if it is installed and there is no `--leader`.

    Raises ConfigError for incomplete or contradictory values, and if tp is not a multiple of the
    number of nodes.
    """
    found = _found(config, environ)
    if config.tp % found.nodes:
        raise ConfigError(
            f"tp is {config.tp}, and there are {found.nodes} nodes by {found.launcher} ({found.reason})",
            wanted="the same number of ranks on each",
            remedy=f"--tp {found.nodes}, or another multiple of it",
        )
    return found


def _found(config: EngineConfig, environ: Mapping[str, str]) -> Placement:
    if config.node_rank is not None:
        return _by_hand(config, config.node_rank)
    launched = by_torchrun(environ) or by_worker_set(environ)
    if config.leader is not None and config.leader.partition(":")[0] == "ray":
        return _by_ray(config, config.leader.partition(":")[2] or environ.get(CLUSTER) or "auto", "--leader says so")
    if launched is not None:
        return _agreed(config, launched)
    if config.nodes == 1:
        if config.leader is None:
            return ALONE
        raise ConfigError(f"leader is {config.leader}, and nodes is 1", remedy="give --nodes and --node-rank as well")
    if config.leader is None and find_spec("ray") is not None:
        known = environ.get(CLUSTER)
        why = f"{CLUSTER} is set" if known else "Ray is installed, and nothing else says how the others start"
        return _by_ray(config, known or "auto", why)
    raise ConfigError(f"nodes is {config.nodes}, and the rank of this node is not known", wanted=WAYS)


def _by_hand(config: EngineConfig, node: int) -> Placement:
    if config.nodes == 1 or config.leader is None:
        missing = "leader" if config.leader is None else "nodes"
        raise ConfigError(
            f"node_rank is {node} and {missing} is not given", remedy="give --nodes N and --leader HOST:PORT as well"
        )
    if node >= config.nodes:
        raise ConfigError(f"node_rank is {node}, and nodes is {config.nodes}", wanted=f"0 to {config.nodes - 1}")
    return Placement("hand", "--node-rank is given", config.nodes, node, host_and_port(config.leader))


def by_torchrun(environ: Mapping[str, str]) -> Placement | None:
    """Return the placement of a process that torchrun started; None if it did not, or started only
    this one. Raises ConfigError for variables that are not numbers. The leader listens on the port
    after MASTER_PORT, which torchrun's own store uses."""
    if any(not environ.get(name) for name in TORCHRUN) or _number(environ, "WORLD_SIZE") == 1:
        return None
    return Placement(
        "torchrun",
        f"{', '.join(TORCHRUN)} are set",
        _number(environ, "WORLD_SIZE"),
        _number(environ, "RANK"),
        (environ["MASTER_ADDR"], _number(environ, "MASTER_PORT") + 1),
        _number(environ, "LOCAL_RANK"),
        _number(environ, "LOCAL_WORLD_SIZE") if environ.get("LOCAL_WORLD_SIZE") else 1,
        restarter="torchrun, by --max-restarts",
    )


def by_worker_set(environ: Mapping[str, str]) -> Placement | None:
    """Return the placement of a pod of a Kubernetes LeaderWorkerSet; None if this is no such pod,
    or the only one. Raises ConfigError for variables that are not numbers."""
    if any(not environ.get(name) for name in WORKER_SET) or _number(environ, "LWS_GROUP_SIZE") == 1:
        return None
    return Placement(
        "a LeaderWorkerSet",
        f"{', '.join(WORKER_SET)} are set",
        _number(environ, "LWS_GROUP_SIZE"),
        _number(environ, "LWS_WORKER_INDEX"),
        (environ["LWS_LEADER_ADDRESS"], LEADER_PORT),
        restarter="the LeaderWorkerSet, by its restartPolicy",
    )


def _by_ray(config: EngineConfig, cluster: str, why: str) -> Placement:
    if config.nodes == 1:
        raise ConfigError("leader is ray, and nodes is 1", remedy="--nodes N says over how many hosts the ranks go")
    return Placement("Ray", why, config.nodes, cluster=cluster)


def _agreed(config: EngineConfig, launched: Placement) -> Placement:
    """Return a launcher's placement, with the leader's address from a flag if one is set. Raises
    ConfigError if flags contradict the launcher."""
    if config.nodes not in (1, launched.nodes):
        raise ConfigError(
            f"nodes is {config.nodes}, and {launched.launcher} has started {launched.nodes}", remedy="leave --nodes out"
        )
    return launched if config.leader is None else replace(launched, leader=host_and_port(config.leader))


def host_and_port(text: str) -> tuple[str, int]:
    """Return the host and port of HOST:PORT; HOST may be in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"leader is {text!r}", wanted="HOST:PORT, ray, or ray:ADDRESS", remedy="correct --leader")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}", wanted="a number", remedy=f"correct {name}, or unset it")
    return int(text)
