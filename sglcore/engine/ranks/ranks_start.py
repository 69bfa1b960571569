"""The start of ranks: settings that cannot be combined are refused, then the processes start
together, each with its part of the model."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sglcore.checkpoint.checkpoint_files import read_json
from sglcore.checkpoint.model_config import architecture_of, read_config
from sglcore.checkpoint.parallel.parallel_sizes import check_topology
from sglcore.checkpoint.parallel.tensor_parallel import check_divisible
from sglcore.config.engine_config import EngineConfig
from sglcore.core.errors import ConfigError, WorkerLost
from sglcore.core.ledger import DecisionLedger, Row
from sglcore.device.package import Ref, resolve
from sglcore.device.selection import Choice
from sglcore.engine.ranks.rank_group import RankGroup, close_all, end_all
from sglcore.engine.ranks.rank_launch import ALONE, Placement, find_placement
from sglcore.engine.ranks.spec import RankProcess, Spawn, limits_text, spawn_local
from sglcore.engine.ranks.team import SILENCES, Maker
from sglcore.engine.ranks.watch import Member, Patience, Watch, ended
from sglcore.engine.ranks.wire import LONGEST_HELLO, Channel, Gone
from sglcore.engine.timed_read import is_readable
from sglcore.worker.model_worker import Limits
from sglcore.worker.topology import Topology

Progress = Callable[[str, int, int], None]
REASON: Ref = "sglcore.runtime.speculative.refused_combinations:reason_in_shards"
"""The function that returns why data-parallel shards cannot use a kind of drafts; a reference,
because the engine does not import the runtime."""
OWN_FILES: Ref = "sglcore.models.architecture_registry:ARCHITECTURES"
"""The architectures that have a model file in sglcore, as a reference."""
HELLO_SECONDS = 5.0
"""Seconds that a new connection may take to send its first frame."""
LOOK_EVERY = 0.05
"""Seconds between two checks whether a process ended before it connected."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """How processes of ranks are started (`spawn`: a function from a RankSpec to a `RankProcess`),
    and the times after which a rank counts as lost (`patience`)."""

    spawn: Spawn = spawn_local
    patience: Patience = Patience()


def check_ranks(config: EngineConfig, folder: Path, choice: Choice, placement: Placement = ALONE) -> None:
    """Raise ConfigError, before any process starts, for settings that cannot be combined with
    several ranks, or with this number of ranks. `folder`: the checkpoint."""
    check_devices(config, choice, placement)
    _check_shards(config)
    if config.model_impl == "transformers":
        raise ConfigError(
            f"tp is {config.tp} and model_impl is {config.model_impl!r}, which do not go together yet",
            remedy="leave --model-impl or --tp out",
        )
    _check_own_file(config, folder)
    checkpoint = read_config(folder, task=config.task)
    check_divisible(checkpoint, config.tp)
    check_topology(checkpoint, topology_of(config))


def _check_own_file(config: EngineConfig, folder: Path) -> None:
    """Raise ConfigError for an architecture without a model file in sglcore: transformers' own
    class, which would run it, cannot be divided among ranks."""
    file = folder / "config.json"
    name = architecture_of(file, read_json(file)) if file.is_file() else ""
    if name and name not in resolve(OWN_FILES):
        raise ConfigError(
            f"tp is {config.tp}, and sglcore has no model file for the architecture {name!r}: transformers' own class,"
            " which may run it, cannot be divided among ranks",
            wanted="an architecture with a model file (docs/models.md)",
            remedy="--tp 1, or --replicas N for N whole models",
        )


def check_devices(config: EngineConfig, choice: Choice, placement: Placement = ALONE) -> None:
    """Raise ConfigError if the device package has no communication between ranks, or if this
    machine has fewer devices, from the chosen one on, than its ranks need. The number is not
    checked if the ranks share a device, or if the probe listed no devices."""
    package, width = choice.package, config.tp
    if package.communication is None:
        raise ConfigError(
            f"tp is {width}, and device {package.name!r} declares no communication between its devices",
            remedy="--tp 1, or another device",
        )
    devices, here = len(choice.report.devices), width // placement.nodes * placement.neighbours
    if not package.ranks_share_device and devices and choice.chosen.index + here > devices:
        raise ConfigError(
            f"tp is {width}, and {package.name!r} has {devices} devices, {devices - choice.chosen.index} of them from"
            f" number {choice.chosen.index} on" + (f"; this host needs {here}" if placement.nodes > 1 else ""),
            remedy=f"--tp {max(devices - choice.chosen.index, 1)}, --device {package.name}:0, or more hosts (--nodes)",
        )


def _check_shards(config: EngineConfig) -> None:
    """Raise ConfigError if `dp` is above 1 together with a kind of speculation that data-parallel
    shards cannot run."""
    if config.dp == 1:
        return
    if reason := resolve(REASON)(config.speculative or "", config.draft_width > 1):
        raise ConfigError(
            f"dp is {config.dp} and speculative is {config.speculative!r}: {reason}",
            remedy="--dp 1, or another --speculative",
        )


def start_ranks(
    config: EngineConfig,
    folder: Path,
    choice: Choice,
    ledger: DecisionLedger,
    progress: Progress,
    options: RankOptions | None = None,
) -> tuple[RankGroup, Mapping[str, float]]:
    """Start all ranks, and return the group once every rank is ready, with the seconds of rank 0's
    bring-up steps. Waits. `folder`: the checkpoint.

    Rank 0's decisions are added to the ledger. Raises ConfigError for a configuration that cannot
    run, and WorkerLost if a rank ends during the start; then no process is left.
    """
    placement = find_placement(config)
    check_ranks(config, folder, choice, placement)
    if placement.node:
        raise ConfigError(
            f"this is node {placement.node} by {placement.launcher}, which takes no requests",
            remedy="start it with `sglcore serve`, like the others",
        )
    options = options or RankOptions()
    patience, communication = options.patience, choice.package.communication
    assert communication is not None
    topology = topology_of(config)
    ledger.record(*_rows(topology, communication.backend))
    epoch, secret = secrets.randbits(32), secrets.token_hex(16)
    told: dict[str, Any] = {"epoch": epoch, "secret": secret, "beat": patience.silence / SILENCES}
    maker = Maker(config, choice, communication, topology, options.spawn, told, placement)
    with ExitStack() as stack:
        team = maker.here(stack) if placement.nodes == 1 else maker.across(stack, folder, progress)
        ledger.record(team.row)
        processes: dict[int, RankProcess] = {}
        try:
            for begin in team.starts:
                processes |= begin()
            found = _gather(team.listener, processes, epoch, secret, patience)
            team.tie(found)
        except BaseException:
            for process in processes.values():
                process.kill()
            team.close()
            raise
        steps = [found[rank, "steps"] for rank in range(topology.world)]
        now = time.monotonic()
        members = [
            Member(rank, processes[rank], found[rank, "control"], now, host=team.host_of(rank))
            for rank in range(topology.world)
        ]
        watch = Watch(members, patience, progress)
        try:
            limits = _come_up(watch)
        except BaseException:
            end_all(watch, steps)
            close_all(watch, steps)
            team.close()
            raise
    first = members[0].ready
    assert first is not None
    ledger.record(*(Row(**row) for row in first["ledger"]))
    return RankGroup(watch, steps, limits, topology.dp, team.close), first["seconds"]


def topology_of(config: EngineConfig) -> Topology:
    """Return the topology of a configuration. Raises ConfigError for sizes that do not divide each
    other."""
    return Topology(tp=config.tp, dp=config.dp, ep=config.ep)


def _rows(topology: Topology, backend: str) -> list[Row]:
    """Return the ledger's rows about the ranks, and about shards (`dp` above 1) and expert ranks
    (`ep` above 1). `backend`: the name of the collectives' library."""
    how = f"{topology.world} processes, each with its part of every layer, over {backend}"
    rows = [Row("ranks", str(topology.tp), f"{topology.tp} of tensors", how, "--tp 1")]
    if topology.dp > 1:
        told = (
            f"each request's KV cache is on {topology.attn_tp} of {topology.tp} ranks, and the ranks agree on each step"
        )
        rows.append(Row("shards of requests", str(topology.dp), str(topology.dp), told, "--dp 1"))
    if topology.ep > 1:
        told = f"each expert is whole on one of {topology.ep} ranks, and tokens are sent there"
        rows.append(Row("expert ranks", str(topology.ep), f"distributed among {topology.ep}", told, "--ep 1"))
    return rows


def _gather(
    listener: socket.socket, processes: Mapping[int, RankProcess], epoch: int, secret: str, patience: Patience
) -> dict[tuple[int, str], Channel]:
    """Return the channels of every rank, by rank and use ("steps" or "control"), once all have
    connected. Raises WorkerLost if a process ends before, or after `patience.starting` seconds."""
    found: dict[tuple[int, str], Channel] = {}
    end = time.monotonic() + patience.starting
    while len(found) < 2 * len(processes):
        if is_readable(listener, LOOK_EVERY):
            _greet(listener, epoch, secret, found)
            continue
        for rank, process in processes.items():
            if (code := process.poll()) is not None:
                raise WorkerLost(f"rank {rank} (process {process.pid}) {ended(code)} before it came up")
        if time.monotonic() > end:
            missing = sorted({rank for rank in processes if (rank, "control") not in found})
            raise WorkerLost(f"ranks {missing} have not come up in {patience.starting:.0f} s")
    return found


def _greet(listener: socket.socket, epoch: int, secret: str, found: dict[tuple[int, str], Channel]) -> None:
    """Accept one connection and add it to `found`, by rank and use; close it if its first frame
    lacks the secret or cannot be read in time."""
    stream, _ = listener.accept()
    channel = Channel(stream, epoch)
    channel.wait_at_most(HELLO_SECONDS)
    try:
        known, rank, use, _ = msgspec.msgpack.decode(channel.receive(LONGEST_HELLO).body)
    except (Gone, TimeoutError, ValueError, TypeError, msgspec.DecodeError):
        channel.close()
        return
    if not secrets.compare_digest(str(known).encode(), secret.encode()):
        channel.close()
        return
    channel.wait_at_most(None)
    found[rank, use] = channel


def _come_up(watch: Watch) -> Limits:
    """Return the limits that all ranks share, once all are ready. Waits. Raises the error of a rank
    that fails, and WorkerLost if the limits of ranks differ."""
    while not watch.is_ready:
        failure = watch.go_round()
        if failure is not None:
            raise failure
    limits = [msgspec.convert(_ready(member)["limits"], Limits) for member in watch.members]
    for rank, other in enumerate(limits):
        if other != limits[0]:
            raise WorkerLost(
                f"rank 0 has {limits_text(limits[0])}, and rank {rank} has {limits_text(other)}; wanted the same"
            )
    return limits[0]


def _ready(member: Member) -> dict[str, Any]:
    assert member.ready is not None
    return member.ready
