"""The engine processes of one server: started, given requests, replaced when they die, ended."""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
from collections.abc import Coroutine, Iterable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from sglcore.device.config import EngineConfig
from sglcore.device.server_config import ServerConfig
from sglcore.serving.channel import FrontChannel
from sglcore.serving.engine_process import plain_config
from sglcore.serving.errors import EngineDied, NotReady
from sglcore.serving.generation import Generation
from sglcore.serving.health import Health
from sglcore.serving.launch import Launcher, LocalLauncher
from sglcore.serving.messages import Address, EngineSpec, EngineStats, ModelInfo, Phase
from sglcore.serving.replica import Replica
from sglcore.serving.router import Router

MOST_FAILED_STARTS = 3
"""Starts in a row that may fail before a replica is given up."""
CONFIG_ERROR = 2
"""The exit code of a start that would fail the same way again."""

log = logging.getLogger("sglcore.serving")


class Fleet:
    """All replicas of one model. `stopped` is set when it can not go on, and then `exit_code` says how the server ends."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        health: Health,
        *,
        chosen: str = "",
        launcher: Launcher | None = None,
        router: Router | None = None,
    ) -> None:
        self.replicas: dict[int, Replica] = {}
        self.health = health
        self.info: ModelInfo | None = None
        self.stopped = asyncio.Event()
        self.exit_code = 0
        self.deaths = 0
        self._config, self._server, self._chosen = config, server, chosen
        self._launcher = launcher or LocalLauncher()
        self._router = router or Router()
        self._context = zmq.asyncio.Context()
        self._folder = tempfile.TemporaryDirectory(prefix="sglcore-")
        self._failed_starts: dict[int, int] = {}
        self._orphans: list[Generation] = []
        self._replacing: set[asyncio.Task[None]] = set()
        self._ending = False
        self._past = EngineStats()

    @property
    def ready(self) -> list[Replica]:
        """The replicas that take requests."""
        return [replica for replica in self.replicas.values() if replica.state == "ready"]

    @property
    def replaces(self) -> bool:
        """A replica that dies is started again."""
        return self._server.restart or self._server.replicas > 1

    async def start(self) -> None:
        """Launch every replica; does not wait for their models."""
        for number in range(self._server.replicas):
            await self._launch(number)

    def submit(self, generation: Generation) -> None:
        """Give a request to a replica; raises NotReady. Does not wait."""
        ready = self.ready
        if not ready:
            raise NotReady(self.health.phase)
        self._router.choose(ready, generation.output.prompt_token_ids).run(generation)

    async def embed(self, request_id: str, ids: list[int]) -> bytes:
        """float32 of an embedding; waits."""
        ready = self.ready
        if not ready:
            raise NotReady(self.health.phase)
        return await self._router.choose(ready, ids).embed(request_id, ids)

    async def audit(self) -> list[str]:
        """What audits of all replicas found; waits."""
        found = await asyncio.gather(*(replica.audit(f"audit-{secrets.token_hex(8)}") for replica in self.ready))
        return [
            f"replica {replica.number}: {problem}"
            for replica, problems in zip(self.ready, found, strict=True)
            for problem in problems
        ]

    def stats(self) -> EngineStats:
        """The newest counters of all replicas together, those that died included."""
        return add_stats([self._past, *(replica.stats for replica in self.replicas.values())])

    async def stop(self) -> None:
        """End every process; what they have is dropped."""
        self._ending = True
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(
            *self._replacing, *(replica.leave() for replica in self.replicas.values()), return_exceptions=True
        )
        self._fail(self._orphans, EngineDied("the server has ended"))
        self._context.destroy(linger=0)
        self._folder.cleanup()

    def on_phase(self, replica: Replica, phase: Phase) -> None:
        """Show how far the start is, unless somebody serves already."""
        if not self.ready:
            self.health.begin(phase.name, phase.done, phase.total)

    def on_ready(self, replica: Replica) -> None:
        """One more takes requests; the server is ready when all that it began with are, and later with any."""
        assert replica.info is not None
        self._failed_starts[replica.number] = 0
        self.info = self.info or replica.info
        if len(self.ready) == self._server.replicas or self.health.started:
            self.health.become_ready()
        orphans, self._orphans = self._orphans, []
        for generation in orphans:
            self._retry(generation)

    def on_death(self, replica: Replica, reason: str, exit_code: int) -> None:
        """Fail what can not be repeated, retry the rest where it is replaced, else end the server."""
        log.error("replica %d: %s", replica.number, reason)
        self.deaths += 1
        self._router.forget(replica)
        self._past = add_stats([self._past, past_only(replica.stats)])
        self.replicas.pop(replica.number, None)
        was_ready = replica.info is not None
        self._failed_starts[replica.number] = 0 if was_ready else self._failed_starts.get(replica.number, 0) + 1
        had = replica.take_generations()
        if not self._ending and self._may_replace(replica, exit_code):
            self._keep(self._replace(replica))
            self._reassign(had, reason)
            if not self.ready:
                self.health.begin("restarting")
            return
        self._fail(had, EngineDied(reason))
        self._keep(replica.close())
        if not self.replicas:
            self._die(reason, exit_code)

    def _may_replace(self, replica: Replica, exit_code: int) -> bool:
        failures = self._failed_starts[replica.number]
        same_again = replica.info is None and exit_code == CONFIG_ERROR
        return self.replaces and not same_again and failures < MOST_FAILED_STARTS

    def _reassign(self, generations: Iterable[Generation], reason: str) -> None:
        """Requests without a token yet lose nothing by a second try; the others would repeat themselves."""
        for generation in generations:
            if generation.is_closed:
                continue
            if generation.has_started:
                generation.fail(EngineDied(f"{reason}; part of the answer had been given"))
            else:
                self._retry(generation)

    def _retry(self, generation: Generation) -> None:
        if generation.is_closed:
            return
        if self.ready:
            self.submit(generation)
        else:
            generation.bind(_drop, lambda ended: None)
            self._orphans.append(generation)

    def _die(self, reason: str, exit_code: int) -> None:
        self.health.die(reason)
        self._fail(self._orphans, EngineDied(reason))
        self.exit_code = exit_code
        self.stopped.set()

    def _fail(self, generations: Iterable[Generation], error: Exception) -> None:
        for generation in list(generations):
            generation.fail(error)

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, replica: Replica) -> None:
        await replica.close()
        failures = self._failed_starts[replica.number]
        if failures:
            await asyncio.sleep(min(2.0**failures, 10.0))
        log.warning("replica %d is started again", replica.number)
        await self._launch(replica.number)

    async def _launch(self, number: int) -> None:
        channel, address = self._open_channel(number)
        spec = EngineSpec(address, plain_config(self._config), number, self._chosen, self._server.grammar_backend)
        process = await self._launcher.launch(spec, self._variables(number))
        self.replicas[number] = Replica(number, channel, process, self)

    def _open_channel(self, number: int) -> tuple[FrontChannel, Address]:
        if not self._launcher.is_remote:
            path = Path(self._folder.name) / f"{number}-{secrets.token_hex(4)}"
            return FrontChannel(self._context, f"ipc://{path}"), Address(f"ipc://{path}")
        front, engine = zmq.curve_keypair(), zmq.curve_keypair()
        channel = FrontChannel(self._context, "tcp://*:0", front)
        return channel, Address(channel.endpoint, front[0].decode(), engine[0].decode(), engine[1].decode())

    def _variables(self, number: int) -> dict[str, str]:
        return {}


def add_stats(parts: Iterable[EngineStats]) -> EngineStats:
    """The sum of counters; `time` is the newest."""
    total = EngineStats(paths={})
    for part in parts:
        for name in EngineStats.__struct_fields__:
            mine, other = getattr(total, name), getattr(part, name)
            if name == "paths":
                for path, steps in other.items():
                    total.paths[path] = total.paths.get(path, 0) + steps
            else:
                setattr(total, name, max(mine, other) if name == "time" else mine + other)
    return total


def past_only(stats: EngineStats) -> EngineStats:
    """What an engine that has ended has done; it holds nothing any more."""
    nothing = dict.fromkeys(
        ("waiting", "running", "compiling", "num_pages", "free_pages", "cached_pages", "unused_cached_pages"), 0
    )
    return msgspec.structs.replace(stats, **nothing)


def _drop(order: object) -> None:
    """No engine has this request."""
