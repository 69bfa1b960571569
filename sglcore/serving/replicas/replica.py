"""One engine process as the frontend sees it: its channel, its state, and its requests."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Literal, Protocol

from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas.channel import FrontendChannel
from sglcore.serving.replicas.engine_launch import EngineProcess
from sglcore.serving.replicas.engine_process import LINK_BROKE
from sglcore.serving.replicas.heartbeat import BEAT_SECONDS, Pulse
from sglcore.serving.replicas.ipc import (
    Able,
    Abort,
    Audit,
    Done,
    Embed,
    Embedded,
    EngineOutputs,
    EngineReply,
    EngineStats,
    Failed,
    Flush,
    ModelInfo,
    Pause,
    Phase,
    Ready,
    Refused,
    Shutdown,
    pack_ids,
)
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.prompt_generation import Generation
from sglcore.serving.replicas.server_errors import EngineDied, InvalidRequest, NotAnswering, Unanswered, ended_badly

State = Literal["starting", "ready", "silent", "unable", "draining", "dead"]
"""The state of a replica. "silent": it was ready, and nothing has arrived from it for some seconds;
"unable": it reports that something is missing, such as another engine."""
STARTED = ("ready", "silent", "unable")
"""States of a replica that has been ready and is neither draining nor dead, so that it has requests
and a cache."""
Answer = Embedded | Done
LONGEST_READ = 120.0
"""Least seconds of silence that are allowed during a start: Python's threads stop while one of them
reads a mapped file."""
ORDER_SECONDS = 20.0
"""Maximum seconds for the answer to an order, which waits for the end of a step."""
UNKILLABLE_SECONDS = 10.0
"""Seconds that a killed process may take to end, for example inside a driver; after that, it is
ignored."""
UNKILLABLE = 1
"""The exit code that is reported for a killed process that has not ended."""

LAST_WORDS_SECONDS = 0.05
"""Seconds for which the last messages of a process are received after it has ended."""

log = logging.getLogger("sglcore.serving")


class Owner(Protocol):
    """The owner of replicas, which is told of their events, on the event loop: the `Supervisor`.
    Its methods do not wait."""

    @property
    def health(self) -> Health:
        """The server's health, as clients see it. After `on_death` it accounts for this death."""
        ...

    def on_phase(self, replica: Replica, phase: Phase) -> None:
        """Handle progress of the replica's start."""
        ...

    def on_ready(self, replica: Replica) -> None:
        """Handle that the replica accepts requests for the first time; its `info` is set."""
        ...

    def on_change(self, replica: Replica, before: State) -> None:
        """Handle that the state of a started replica has changed from `before` to `replica.state`:
        it accepts no requests for now ("silent", "unable"), or accepts them again ("ready")."""
        ...

    def on_death(self, replica: Replica, reason: str, exit_code: int) -> None:
        """Handle that the process of a replica ended without an order. Its requests are still in
        `generations`; calls that wait for an embedding or an order fail after this. `reason`: a
        text for errors; `exit_code`: the one that the engine reported before its end (`Failed`),
        else 1."""
        ...


class Replica:
    """One engine process as the frontend sees it: its channel, its state, and the requests that it
    has (`generations`, by id). `stats`: its newest counters; `info`: None until it has been ready.
    It is used on the event loop only."""

    def __init__(self, number: int, channel: FrontendChannel, process: EngineProcess, owner: Owner) -> None:
        """Start to listen to a process that was launched; `owner` is told of its events. Needs a
        running event loop."""
        self.number = number
        self.state: State = "starting"
        self.info: ModelInfo | None = None
        self.stats = EngineStats()
        self.generations: dict[str, Generation] = {}
        self.process = process
        self._channel = channel
        self._owner = owner
        self.lacks = ""
        """What it reports as missing."""
        self._error, self._exit_code = "", 0
        self._answers: dict[str, asyncio.Future[Answer]] = {}
        self._samples = 0
        self._ready_at: float | None = None
        self._heard_at = time.monotonic()
        self._pulse = Pulse()
        self._overdue = asyncio.Event()
        self._watcher = asyncio.create_task(self._watch())
        self._tasks = [self._watcher, asyncio.create_task(self._listen()), asyncio.create_task(self._hear_beats())]

    @property
    def load(self) -> int:
        """Number of samples of requests that have not ended (all samples of a request count until
        its last one ends), plus the prompts to embed and orders that wait for an answer."""
        return self._samples + len(self._answers)

    @property
    def page_size(self) -> int:
        """Tokens of a page of its KV cache. Only once it has been ready."""
        assert self.info is not None
        return self.info.limits["page_size"]

    @property
    def num_pages(self) -> int:
        """Number of pages of its KV cache. Only once it has been ready."""
        assert self.info is not None
        return self.info.limits["num_pages"]

    @property
    def lived(self) -> float | None:
        """Seconds since it became ready, also after its end; None: it never was ready."""
        return None if self._ready_at is None else time.monotonic() - self._ready_at

    @property
    def report_age(self) -> float:
        """Seconds since its last message or heartbeat, or since its launch."""
        return time.monotonic() - self._heard_at

    @property
    def is_still(self) -> bool:
        """Whether it has been in one step for seconds, so that a new request would wait."""
        return self._pulse.is_still

    def tick(self, most_silence: float, most_step: float) -> None:
        """Check the process; called every BEAT_SECONDS. After a few checks without a message or
        heartbeat it becomes silent. After `most_silence` seconds of silence (at least LONGEST_READ
        during its start), or if a step takes more than `most_step` seconds, it is killed."""
        pulse = self._pulse
        pulse.tick()
        if self.state not in ("starting", *STARTED) or self._overdue.is_set():
            return
        limit = max(most_silence, LONGEST_READ) if self.state == "starting" else most_silence
        if pulse.silence * BEAT_SECONDS > limit:
            self._end(f"has given no sign of life for {limit:g} s (heartbeat_timeout) and was killed")
        elif self.state != "starting" and pulse.standstill * BEAT_SECONDS > most_step:
            self._end(f"was in one step for {most_step:g} s (step_timeout) and was killed")
        else:
            self._settle_state()

    def run(self, generation: Generation) -> None:
        """Send a request to the engine, and keep it in `generations` until it ends; does not wait.
        The replica must be ready, which is not checked."""
        self.generations[generation.request_id] = generation
        self._samples += len(generation.output.outputs)
        generation.tries += 1
        generation.bind(self._channel.send, self._forget, self.info.fingerprint if self.info is not None else "")
        self._channel.send(generation.request)

    async def embed(self, request_id: str, ids: list[int], segments: list[int] | None = None) -> bytes:
        """Return the embedding or the scores of a prompt, float32 as little-endian bytes; waits. If
        the caller is cancelled, the engine is told to abort. `segments`: segment ids (None: all 0).
        Raises InvalidRequest if the engine refuses it, Unanswered if it fails, and EngineDied."""
        request = Embed(request_id, pack_ids(ids), pack_ids(segments or ()))
        answer = await self._answer(request)
        assert isinstance(answer, Embedded)
        if answer.error:
            raise Unanswered(ended_badly("error", f"this embedding failed: {answer.error}"))
        return answer.vector

    async def order(self, order: Audit | Pause | Flush) -> Done:
        """Send an order and return its result; waits at most ORDER_SECONDS. Raises EngineDied, and
        NotAnswering if no answer came in time, or at once if the replica is silent. The engine may
        still execute the order later."""
        who = f"replica {self.number}"
        if self.state == "silent":
            raise NotAnswering(who, f"it has given no sign of life for {self._pulse.silence * BEAT_SECONDS:g} s")
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                done = await self._answer(order)
        except TimeoutError:
            raise NotAnswering(who, f"it has not answered a command in {ORDER_SECONDS:g} s") from None
        assert isinstance(done, Done)
        return done

    async def shut_down(self, seconds: float) -> None:
        """Order the process to end, wait for its end, and kill it after `seconds`. A process that
        is starting or silent is killed at once. Then closes. The owner is not told of this end;
        requests in progress get no error here."""
        if self.state in ("ready", "unable"):
            self.state = "draining"
            self._channel.send(Shutdown())
            if not await self._has_ended(seconds):
                log.warning(
                    "engine %d has not freed its device in %g s (shutdown_timeout) and is killed", self.number, seconds
                )
        await self.close()

    async def close(self) -> None:
        """Kill the process if it runs, wait up to UNKILLABLE_SECONDS for its end, stop listening,
        and close the channel."""
        if self.state != "dead":
            self.state = "draining"
            self.process.kill()
            if not await self._has_ended(UNKILLABLE_SECONDS):
                log.error("the engine %s was killed and has not ended", self.process.name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channel.close()

    def give_up(self, error: Exception) -> None:
        """Make calls that wait for an embedding or an order raise `error`; does not wait.
        Generations are not touched."""
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)

    def take_generations(self) -> list[Generation]:
        """Return the requests that have not ended, and remove them from this replica."""
        taken, self.generations = list(self.generations.values()), {}
        return taken

    def _end(self, why: str) -> None:
        """Kill the process for the reason `why`, which continues "the engine NAME"; does not wait.
        `on_death` follows when it has ended or does not end in time."""
        self._error = f"the engine {self.process.name} {why}"
        self._overdue.set()
        self.process.kill()

    async def _has_ended(self, seconds: float) -> bool:
        ended, _ = await asyncio.wait([self._watcher], timeout=seconds)
        return bool(ended)

    async def _answer(self, request: Embed | Audit | Pause | Flush) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[request.request_id] = future
        self._channel.send(request)
        try:
            return await future
        except asyncio.CancelledError:
            if isinstance(request, Embed):
                self._channel.send(Abort(request.request_id))
            raise
        finally:
            self._answers.pop(request.request_id, None)

    async def _listen(self) -> None:
        """Receive the engine's replies until cancelled.

        If a reply cannot be handled, parts of answers are lost, so the engine is then killed.
        """
        try:
            while True:
                reply = await self._channel.receive()
                self._take(reply)
                self._hear()  # afterwards: the reply may say that it is unable
        except Exception as error:
            log.exception("a reply of engine %d could not be handled", self.number)
            self._error = f"a reply of the engine could not be handled: {type(error).__name__}: {error}"
            self.process.kill()

    async def _hear_beats(self) -> None:
        while True:
            beat = await self._channel.beat()
            self._pulse.beat(beat.rounds)
            self._hear()

    def _hear(self) -> None:
        """Note that a message or heartbeat has arrived."""
        self._heard_at = time.monotonic()
        self._pulse.hear()
        self._settle_state()

    def _settle_state(self) -> None:
        """Set the state of a replica in STARTED to "silent", "unable" or "ready", from its
        heartbeats and its reports, and tell the owner of a change."""
        if self.state not in STARTED or self._overdue.is_set():
            return
        before = self.state
        self.state = "silent" if self._pulse.is_silent else "unable" if self.lacks else "ready"
        if self.state != before:
            self._owner.on_change(self, before)

    def _take(self, reply: EngineReply) -> None:
        if isinstance(reply, EngineOutputs):
            for output in reply.items:
                self._deliver(output)
        elif isinstance(reply, EngineStats):
            self.stats = reply
        elif isinstance(reply, Answer):
            self._settle(reply.request_id, reply)
        elif isinstance(reply, Refused):
            self._refuse(reply)
        elif isinstance(reply, Phase):
            self._owner.on_phase(self, reply)
        elif isinstance(reply, Ready):
            self.info, self.state, self._ready_at = reply.info, "ready", time.monotonic()
            self._pulse.begin_rounds()
            self._owner.on_ready(self)
        elif isinstance(reply, Able):
            self.lacks = reply.lacks
            self._settle_state()
        elif isinstance(reply, Failed):
            self._error, self._exit_code = reply.error, reply.exit_code

    def _deliver(self, output: EngineOutput) -> None:
        generation = self.generations.get(output.request_id)
        if generation is None:
            return
        try:
            generation.deliver(output)
        except Exception as error:
            log.exception("an output of one request could not be processed")
            self._channel.send(Abort(output.request_id))
            generation.fail(Unanswered(ended_badly("error", f"its answer was lost: {error}")))

    def _settle(self, request_id: str, answer: Answer) -> None:
        future = self._answers.get(request_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def _refuse(self, reply: Refused) -> None:
        error = InvalidRequest(reply.error)
        generation, future = self.generations.get(reply.request_id), self._answers.get(reply.request_id)
        if generation is not None:
            generation.fail(error)
        if future is not None and not future.done():
            future.set_exception(error)

    async def _watch(self) -> None:
        code = await self._end_of_process()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        told, self.state = self.state == "draining", "dead"
        reason = self._error or self.process.last_words or f"the engine {self.process.name} {_cause(code)}"
        if not told:
            self._owner.on_death(self, reason, self._exit_code or 1)
        self.give_up(EngineDied(reason, self._owner.health.remedy))

    async def _end_of_process(self) -> int:
        """Wait until the process has ended, and return its exit code; UNKILLABLE if it was killed
        and does not end in UNKILLABLE_SECONDS."""
        ended = asyncio.ensure_future(self.process.wait())
        overdue = asyncio.ensure_future(self._overdue.wait())
        try:
            await asyncio.wait((ended, overdue), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await asyncio.wait((ended,), timeout=UNKILLABLE_SECONDS)
            if ended.done():
                return ended.result()
            self._error += f", and has not ended in {UNKILLABLE_SECONDS:g} s"
            return UNKILLABLE
        finally:
            ended.cancel()
            overdue.cancel()

    def _forget(self, generation: Generation) -> None:
        if self.generations.pop(generation.request_id, None) is not None:
            self._samples -= len(generation.output.outputs)


def _cause(code: int) -> str:
    if code == LINK_BROKE:
        return "lost its connection to this server"
    return f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"
