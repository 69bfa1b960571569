"""Engine processes on the machines of a Ray cluster. Ray places them and reports their ends; all
messages use our channel.

Each replica is an actor that starts the engine as its child, so an engine is the same process on
any machine. Ray pickles what it sends; requests, tokens and routing therefore stay with the
frontend, which is connected to each engine over TCP with CURVE keys. The keys are part of the
actor's start, so anyone who may run code in the cluster may know them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from sglcore.core.errors import ConfigError
from sglcore.engine.ranks.launch_ray import ChildActor, check_installed, connect, last_line, ray_module
from sglcore.serving.replicas.ipc import EngineSpec

PENDING_SECONDS = 15.0
"""Seconds without a place in the cluster after which the log reports the resources that are
missing."""
ENGINE = "sglcore.serving.replicas.engine_process"
LOST = 1
"""The exit code of an engine if the cause of its end is unknown."""

log = logging.getLogger("sglcore.serving")


class RayProcess:
    """The `EngineProcess` in a Ray actor, which may still wait for its place in the cluster.
    `wanted`: the resources that it needs, for the log; `host` and `pid`: "" and 0 before it has a
    place."""

    def __init__(self, actor: Any, replica: int, wanted: Mapping[str, float]) -> None:
        self._actor, self._replica, self._wanted = actor, replica, dict(wanted)
        self._killed = asyncio.Event()
        self.host, self.pid = "", 0
        """The machine and process number, once it has a place."""
        self.last_words = ""

    @property
    def name(self) -> str:
        """Its name for messages: its process id and machine, once it has a place; before, that it
        has none."""
        return f"process {self.pid} on {self.host}" if self.host else f"of replica {self._replica} without a place"

    async def wait(self) -> int:
        """Return the exit code (LOST if the cause is unknown); waits until the process, its actor
        or its machine has ended, or `kill` was called. Frees its place in the cluster."""
        ended = asyncio.ensure_future(self._follow())
        killed = asyncio.ensure_future(self._killed.wait())
        await asyncio.wait((ended, killed), return_when=asyncio.FIRST_COMPLETED)
        code = ended.result() if ended.done() else LOST
        ended.cancel()
        killed.cancel()
        self.kill()
        return code

    def kill(self) -> None:
        """Kill the actor, and with it the process, without waiting for its end. Idempotent."""
        if not self._killed.is_set():
            ray = ray_module()

            self._killed.set()
            ray.kill(self._actor)

    async def _follow(self) -> int:
        ray = ray_module()

        try:
            place = asyncio.ensure_future(_result(self._actor.place.remote()))
            placed, _ = await asyncio.wait((place,), timeout=PENDING_SECONDS)
            if not placed:
                log.warning(
                    "replica %d has no place yet: it wants %s and the cluster has %s",
                    self._replica,
                    self._wanted,
                    {name: amount for name, amount in ray.cluster_resources().items() if ":" not in name},
                )
            self.host, self.pid = await place
            return await _result(self._actor.wait.remote())
        except ray.exceptions.RayError as error:
            log.error("Ray lost the actor of replica %d: %s", self._replica, error)
            self.last_words = f"Ray lost the actor of the engine {self.name}: {last_line(str(error))}"
            return LOST


class RayLauncher:
    """The `Launcher` that starts engines in actors, spread over the machines of a Ray cluster."""

    is_remote = True

    def __init__(self, address: str, resources: Mapping[str, float], replicas: int) -> None:
        """`address`: HOST:PORT of the cluster's head, "auto" (the cluster that this machine is in),
        or "local" (a new one of this machine only, with room for `replicas`); `resources`: amounts
        for each engine by Ray's names (CPU: 1 by default). Does not connect yet. Raises ConfigError
        for a cluster that does not include this machine, and if Ray is not installed."""
        if "://" in address:
            raise ConfigError(
                f"ray is {address!r}, a cluster that does not include this machine",
                wanted="auto, local, or the host and port of a cluster's head",
                remedy="start the server on a machine of the cluster "
                "(`ray start --address=HOST:PORT` makes this one so)",
            )
        check_installed()
        self._address, self._replicas = address, replicas
        self._resources = {"CPU": 1.0, **resources}
        self._connected = asyncio.Lock()
        self._is_connected = self._is_ours = False

    async def frontend_host(self) -> str:
        """Return the address of this machine in the cluster. Joins the cluster first, which waits;
        raises ConfigError if it cannot."""
        ray = ray_module()

        await self._connect()
        return ray.util.get_node_ip_address()

    async def launch(self, spec: EngineSpec, variables: Mapping[str, str]) -> RayProcess:
        """Request an actor that starts the engine with `spec` and, in addition to its environment,
        `variables`; waits for the connection to the cluster, but neither for a place in it nor for
        the model. Raises ConfigError if the cluster cannot be joined."""
        ray = ray_module()

        await self._connect()
        others = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU", "memory")}
        host = ray.remote(ChildActor).options(
            num_cpus=self._resources["CPU"],
            num_gpus=self._resources.get("GPU", 0.0),
            memory=self._resources.get("memory"),
            resources=others or None,
            scheduling_strategy="SPREAD",
            max_restarts=0,
            max_concurrency=2,
        )
        line = msgspec.json.encode(spec) + b"\n"
        return RayProcess(host.remote(ENGINE, line, dict(variables)), spec.replica, self._resources)

    async def close(self) -> None:
        """Leave the cluster, and end it if this launcher started it. Waits. Idempotent."""
        ray = ray_module()

        if self._is_connected and self._is_ours:
            await asyncio.to_thread(ray.shutdown)
        self._is_connected = False

    async def _connect(self) -> None:
        async with self._connected:
            if not self._is_connected:
                room = math.ceil(self._replicas * self._resources["CPU"])
                self._is_ours = await asyncio.to_thread(connect, self._address, room)
                self._is_connected = True


async def _result(reference: Any) -> Any:
    """Return the result of an actor's call, given its reference; waits. Raises what the call
    raised, or an error of Ray."""
    return await reference
