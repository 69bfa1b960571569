"""The engine processes of one server: starts them, sends them requests, replaces them when they
die, ends them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import zmq
import zmq.asyncio

from sglcore.config.engine_config import EngineConfig, plain_config
from sglcore.config.server_config import ServerConfig
from sglcore.device.choice import ChosenDevice
from sglcore.engine.disaggregation.disaggregation_start import options_of
from sglcore.serving.replicas.channel import open_channel
from sglcore.serving.replicas.configs import decided, is_open, with_whole_path
from sglcore.serving.replicas.engine_launch import Launcher, launcher_for
from sglcore.serving.replicas.heartbeat import BEAT_SECONDS
from sglcore.serving.replicas.ipc import EngineSpec, EngineStats, ModelInfo, Phase
from sglcore.serving.replicas.metrics.engine_stats import add_stats, past_only
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.operator_commands import audit_all, flush_all, pause, pause_all
from sglcore.serving.replicas.prompt_generation import Generation
from sglcore.serving.replicas.replica import STARTED, Replica, State
from sglcore.serving.replicas.restart import LONGEST_WAIT, RestartPolicy
from sglcore.serving.replicas.router import Router
from sglcore.serving.replicas.server_errors import EngineDied, NotAnswering, NotReady, ShuttingDown
from sglcore.serving.replicas.socket_folder import SocketFolder

MOST_TRIES = 3
"""Maximum number of engines that may end while they run the same request. The limit keeps a request
that kills each engine from killing all of them forever."""

log = logging.getLogger("sglcore.serving")


class Supervisor:
    """All replicas of one model. `stopped` is set when the server must end; `exit_code` is then the
    server's.

    A replica that dies is restarted if there are several, or with the setting `restart`. Requests
    of which the client has got nothing are retried on another replica, or wait, until MOST_TRIES
    engines have ended with them; the others fail. A replica is given up if it is not to be
    restarted, if its start fails with CONFIG_ERROR, or after MOST_FAILED_STARTS failed starts in a
    row. That ends the server if no replica is left, or, so that the user sees it at once, if the
    server has never been ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        health: Health,
        *,
        chosen: Sequence[str] = (),
        launcher: Launcher | None = None,
        router: Router | None = None,
        longest_wait: float = LONGEST_WAIT,
    ) -> None:
        """`health` is kept up to date. `chosen`: the device of each replica, encoded, for engines
        on this machine (empty: each chooses); `launcher` None: as the configuration says; `router`
        None: a new one; `longest_wait`: maximum seconds before a restart. Launches nothing before
        `start`. Needs a running event loop. Raises ConfigError for a launcher that is not
        installed."""
        self.replicas: dict[int, Replica] = {}
        self.health = health
        self.info: ModelInfo | None = None
        self.stopped = asyncio.Event()
        self.exit_code = 0
        self.deaths = 0
        self.is_paused = self._is_given_up = False
        self._config, self._server, self._chosen = with_whole_path(config), server, tuple(chosen)
        self._launcher = launcher or launcher_for(server)
        self._router = router or Router()
        self._context = zmq.asyncio.Context()
        self._folder = SocketFolder()
        self._restarts = {number: RestartPolicy(longest_wait) for number in range(server.replicas)}
        """Restart records of the replicas that run or will run again."""
        self._held_back: Sequence[int] = ()
        self._orphans: dict[str, Generation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pauses: set[asyncio.Task[None]] = set()
        """Tasks of pause orders. No caller waits for them, and a stop cancels them."""
        self._looks: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._changed = asyncio.Event()
        self._past = EngineStats()

    @property
    def ready(self) -> list[Replica]:
        """The replicas that accept requests now, in a new list; perhaps none."""
        return [replica for replica in self.replicas.values() if replica.state == "ready"]

    @property
    def replaces(self) -> bool:
        """Whether replicas that die are restarted, as far as `RestartPolicy` allows."""
        return self._server.restart or self._server.replicas > 1

    async def start(self) -> None:
        """Launch all replicas, or only the first if the others wait for its measured decisions;
        does not wait until they are ready. Raises an error of a process that cannot be launched."""
        self._looks = asyncio.create_task(self._look_on())
        numbers = range(self._server.replicas)
        at_once = 1 if is_open(self._config) else len(numbers)
        self._held_back = numbers[at_once:]
        for number in numbers[:at_once]:
            await self._launch(number)

    def tick(self) -> None:
        """Check all replicas; called every BEAT_SECONDS. Silent ones get no requests, and those
        that are silent or in one step for too long are killed."""
        for replica in list(self.replicas.values()):
            replica.tick(self._server.heartbeat_timeout, self._server.step_timeout)

    def submit(self, generation: Generation) -> None:
        """Send a request to the replica that the router chooses, or keep it for one that is being
        restarted or is silent. Does not wait. Raises NotReady if no replica may come."""
        if self.ready:
            cached = self._config.prefix_cache and self.info is not None and self.info.generates
            self._choose(generation.request.prompt if cached else b"").run(generation)
            return
        if not self._may_come:
            raise self.health.refusal()
        generation.bind(_drop, self._forget_orphan)
        self._orphans[generation.request_id] = generation

    async def embed(self, request_id: str, ids: list[int], segments: list[int] | None = None) -> bytes:
        """Return the embedding or the scores of a prompt, float32 as little-endian bytes; waits,
        also for a replica that is being restarted. If its engine dies, it is retried on another
        one, on MOST_TRIES engines at most. Parameters and errors are those of `Replica.embed`;
        raises NotReady too."""
        died: EngineDied | None = None
        for _ in range(MOST_TRIES):
            while not self.ready:
                if not self._may_come or self._is_given_up:
                    raise self.health.refusal() if died is None else EngineDied(died.found, self.health.remedy)
                await self._changed.wait()
            try:
                return await self._choose(b"").embed(request_id, ids, segments)
            except EngineDied as error:
                died = error
        assert died is not None
        raise died

    async def audit(self) -> list[str]:
        """Return what the audits of all started replicas found, and the replicas that did not
        answer; empty if nothing was found. Waits at most 20 seconds."""
        return await audit_all(self._serving)

    async def pause(self, is_paused: bool) -> None:
        """Pause all engines, later ones included, or let all continue (`is_paused` false); waits
        until they do so. Raises NotAnswering if one does not answer in time; it does so later."""
        self.is_paused = is_paused
        await pause_all(self._serving, is_paused)

    async def flush(self) -> int:
        """Drop cached prefixes that no request uses, in all started engines, and return their
        number of pages.

        Waits. Raises NotAnswering if an engine does not answer in time, and EngineDied.
        """
        return await flush_all(self._serving)

    def has(self, request_id: str) -> bool:
        """Return whether a request (not an embedding) with this id is in progress or waits for a
        replica."""
        return request_id in self._orphans or any(request_id in each.generations for each in self.replicas.values())

    @property
    def generations(self) -> list[Generation]:
        """The requests that have not ended, those without a replica included."""
        had = [each for replica in self.replicas.values() for each in replica.generations.values()]
        return [*had, *self._orphans.values()]

    def stats(self) -> EngineStats:
        """Return the sums of the newest counters of all replicas, with the totals of dead ones.
        Does not wait."""
        return add_stats([self._past, *(replica.stats for replica in self.replicas.values())])

    def give_up(self, error: Exception) -> None:
        """Make every request fail with `error`, also embeddings, orders, and requests that wait for
        a replica. The replicas continue to run, and may get new requests. Does not wait."""
        self._is_given_up = True
        self._fail(self.generations, error)
        for replica in self.replicas.values():
            replica.give_up(error)
        self._tell_change()

    async def stop(self) -> None:
        """End all processes and release all resources; requests in progress fail. Waits.
        Idempotent."""
        self.health.drain()
        self._ending.set()
        for task in (self._looks, *self._pauses):
            if task is not None:
                task.cancel()
        self._tell_change()
        await self._settle()
        self.give_up(ShuttingDown("the server has ended before this request"))
        seconds = self._server.shutdown_timeout
        ends = [replica.shut_down(seconds) for replica in self.replicas.values()]
        _log_failures(await asyncio.gather(*ends, return_exceptions=True))
        self.replicas.clear()
        await self._settle()
        await self._launcher.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    def on_phase(self, replica: Replica, phase: Phase) -> None:
        """Implements `Owner.on_phase`: show the progress of the start, unless a replica is
        ready."""
        if not self.ready:
            self.health.begin(phase.name, phase.done, phase.total)

    def on_ready(self, replica: Replica) -> None:
        """Implements `Owner.on_ready`. During its start the server becomes ready when all replicas
        are; later with any."""
        assert replica.info is not None
        self._config = decided(self._config, replica.info)
        for number in self._held_back:
            self._keep(self._replace(number))
        self._held_back = ()
        if self.info is None or self.ready == [replica]:
            self.info = replica.info
        elif replica.info.fingerprint != self.info.fingerprint:
            log.warning(
                "replica %d has the fingerprint %s and another has %s: they differ in version, device or model, so the"
                " same seed may give another text",
                replica.number,
                replica.info.fingerprint,
                self.info.fingerprint,
            )
        if self.health.started or len(self.ready) == len(self._restarts):
            self.health.become_ready()
        if self.is_paused:
            self._keep(self._pause_late(replica), self._pauses)
        self._give_orphans()

    def on_change(self, replica: Replica, before: State) -> None:
        """Implements `Owner.on_change`.

        A replica that accepts no requests keeps those that it has. New requests go to other
        replicas, or wait for a silent one. A replica that is no longer silent gets the present
        pause state, which it may have missed.
        """
        said = "gives no sign of life" if replica.state == "silent" else replica.lacks or "takes requests again"
        log.warning("replica %d: %s", replica.number, said)
        if self.health.started and self.ready:
            self.health.become_ready()
        elif self.health.started:
            self.health.begin(replica.state, reason=replica.lacks)
        if before == "silent":
            self._keep(self._pause_late(replica), self._pauses)
        if self.ready or not self._may_come:
            self._give_orphans()

    def on_death(self, replica: Replica, reason: str, exit_code: int) -> None:
        """Implements `Owner.on_death`. If the replica is restarted, its requests of which the
        client has got nothing are retried, as the class says, and the others fail. If it is given
        up, the same happens on the other replicas, or the server ends."""
        self.deaths += 1
        self._router.forget(replica.number)
        self._past = add_stats([self._past, past_only(replica.stats)])
        self.replicas.pop(replica.number, None)
        self._keep(replica.close())
        self._restarts[replica.number].end(replica.lived, exit_code)
        self._after(replica.number, reason, exit_code, replica.take_generations())

    def _after(self, number: int, reason: str, exit_code: int, had: list[Generation]) -> None:
        """Replace replica `number`, whose process has ended, and retry the requests `had` that it
        had; or give the replica up, as the class says. While the server ends, these requests only
        fail."""
        goes_on = self.replaces and self._restarts[number].may_go_on
        if (
            goes_on or self.health.started or self._server.log_file is not None
        ):  # otherwise the caller that starts the server reports it
            log.error("replica %d: %s", number, reason)
        if self._ending.is_set():
            self._fail(had, EngineDied(reason, self.health.remedy))
        elif goes_on:
            if not self.ready:
                self.health.begin("restarting")
            self._keep(self._replace(number))
            self._reassign(had, reason)
        else:
            self._give_up(number, reason, exit_code, had)
        self._tell_change()

    def _give_up(self, number: int, reason: str, exit_code: int, had: list[Generation]) -> None:
        del self._restarts[number]
        if self._restarts and self.health.started:
            log.error("replica %d is given up; %d go on", number, len(self._restarts))
            self._reassign(had, reason)
            self._give_orphans()
            return
        self.health.die(reason)
        self._fail([*had, *self._take_orphans()], EngineDied(reason, self.health.remedy))
        self.exit_code = self.exit_code or exit_code
        self.stopped.set()

    def _reassign(self, generations: Iterable[Generation], reason: str) -> None:
        """Retry requests if the client has got nothing of them, unless MOST_TRIES engines have
        ended with them; make the others fail with EngineDied, because a retry would repeat their
        text. `reason`: how the engine ended."""
        for generation in generations:
            if generation.is_told:
                generation.fail(EngineDied(f"{reason}; part of the answer had been given", self.health.remedy))
            elif generation.tries >= MOST_TRIES:
                ended = f"{reason}; {generation.tries} engines have ended while they had this request"
                generation.fail(EngineDied(ended, self.health.remedy))
            else:
                generation.restart()
                self._retry(generation)

    def _retry(self, generation: Generation) -> None:
        if generation.is_closed:
            return
        try:
            self.submit(generation)
        except NotReady as error:
            generation.fail(error)

    @property
    def _serving(self) -> list[Replica]:
        """The replicas in STARTED: they have requests and caches."""
        return [replica for replica in self.replicas.values() if replica.state in STARTED]

    def _choose(self, prompt: bytes) -> Replica:
        """Return the replica that the router chooses among the ready ones, at least one, for a
        prompt (token ids as bytes; empty: ignore the caches). One that has been in one step for
        seconds is chosen only if all have."""
        moving = [replica for replica in self.ready if not replica.is_still]
        return self._router.choose(moving or self.ready, prompt)

    def _give_orphans(self) -> None:
        for generation in self._take_orphans():
            self._retry(generation)
        self._tell_change()

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            try:
                self.tick()
            except Exception:  # one that cannot be killed now is tried again
                log.exception("the check of a replica failed")

    async def _pause_late(self, replica: Replica) -> None:
        with suppress(NotAnswering):
            await pause(replica, self.is_paused)

    @property
    def _goes_on(self) -> bool:
        """Whether the server has been ready, and neither ends nor has stopped."""
        return self.health.started and not (self._ending.is_set() or self.stopped.is_set())

    @property
    def _may_come(self) -> bool:
        """Whether a request may wait for a replica, because one is being restarted or is silent.
        Replicas that lack something do not count."""
        unable = sum(replica.state == "unable" for replica in self.replicas.values())
        return self._goes_on and unable < len(self._restarts)

    def _take_orphans(self) -> list[Generation]:
        taken, self._orphans = list(self._orphans.values()), {}
        return taken

    def _forget_orphan(self, generation: Generation) -> None:
        self._orphans.pop(generation.request_id, None)

    def _fail(self, generations: Iterable[Generation], error: Exception) -> None:
        for generation in generations:
            generation.fail(error)

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _keep(self, work: Coroutine[None, None, None], among: set[asyncio.Task[None]] | None = None) -> None:
        tasks = self._tasks if among is None else among
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _settle(self) -> None:
        """Wait until no task that closes or replaces a replica is left, those that begin meanwhile
        included; their errors are logged."""
        while self._tasks:
            _log_failures(await asyncio.gather(*self._tasks, return_exceptions=True))

    async def _replace(self, number: int) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), self._restarts[number].wait)
        if self._ending.is_set():
            return
        log.warning("replica %d is started", number)
        try:
            await self._launch(number)
        except Exception as error:  # any error: requests that wait for this replica must get it
            log.exception("replica %d cannot be started", number)
            self._restarts[number].end(None, 1)
            self._after(number, f"its process cannot be started: {error}", 1, [])

    async def _launch(self, number: int) -> None:
        channel, address = open_channel(self._context, await self._endpoint(number))
        chosen = self._chosen[number] if self._chosen and not self._launcher.is_remote else ""
        pages, config = options_of(self._server, number), self._config
        if chosen:
            config = replace(config, device=ChosenDevice.decode(chosen).pinned(config.device))
        spec = EngineSpec(address, plain_config(config), number, chosen, pages)
        try:
            process = await self._launcher.launch(spec, self._server.variables_of(number))
        except BaseException:
            channel.close()
            raise
        self.replicas[number] = Replica(number, channel, process, self)

    async def _endpoint(self, number: int) -> str:
        if self._launcher.is_remote:
            return f"tcp://{await self._launcher.frontend_host()}:0"
        return f"ipc://{Path(self._folder.name) / f'{number}-{secrets.token_hex(4)}'}"


def _log_failures(found: Iterable[object]) -> None:
    """Log the errors in `found`, the results of tasks; other results are ignored. Nothing else
    reads these errors."""
    for each in found:
        if isinstance(each, Exception):
            log.error("an engine did not end as it should: %s", each, exc_info=each)


def _drop(request: object) -> None:
    """Ignore the request: no engine has the generation yet."""
