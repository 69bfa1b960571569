"""The loop of an engine process: receive requests, run a step, send the outputs."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from msgspec import structs

from sglcore.core.errors import SglcoreError, WorkerLost
from sglcore.engine.metered_worker import Meter
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.params import SamplingError
from sglcore.schedule.request import Request, State
from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas.channel import EngineChannel
from sglcore.serving.replicas.ipc import (
    Able,
    Abort,
    Audit,
    Done,
    Embed,
    Embedded,
    EngineOutputs,
    EngineRequest,
    EngineStats,
    Failed,
    Flush,
    GenerateRequest,
    Pause,
    Refused,
    Shutdown,
    Stop,
    unpack_ids,
    unpack_params,
)

IDLE_MS = 500
"""Maximum milliseconds that an idle engine waits for a request in one round of its loop."""
STATS_EVERY = 0.25
"""Seconds between two replies with counters."""
MOST_FAILURES = 3
"""Number of consecutive failed steps after which the process gives up, because the device will not
recover."""


class EngineService:
    """The loop of one engine over its channel; `run` is the entry."""

    def __init__(
        self,
        engine: TokenEngine,
        meter: Meter,
        channel: EngineChannel,
        check: Callable[[], None] = lambda: None,
        on_round: Callable[[], object] = int,
    ) -> None:
        """`meter`: the engine's worker, which counts its steps. `check` raises WorkerLost if the
        worker can run no further step; it does not wait, and is called while there is no step to
        run. `on_round` is called in each round of the loop: at least twice a second, except during
        longer steps."""
        self.engine = engine
        self._check, self._on_round = check, on_round
        self._meter = meter
        self._channel = channel
        self._embeds: dict[str, Request] = {}
        self._shutting_down = self._is_paused = False
        self._lacks = ""
        self._failures = self._failed_steps = 0
        self._requests = self._prompt_tokens = self._generated = 0
        self._step_seconds = self._device_before = 0.0
        self._drafts_before = Counter[tuple[int, int, int, int]]()
        self._host_steps = 0
        self._next_stats = 0.0

    def run(self) -> int:
        """Serve until the frontend orders a shutdown (returns 0), or until MOST_FAILURES steps in a
        row have failed (returns 1, and the frontend gets `Failed`). Raises WorkerLost if this
        process must end and another one be started."""
        self._device_before, self._drafts_before = self._meter.device_seconds, self.engine.scheduler.drafts.copy()
        while not self._shutting_down:
            self._on_round()
            busy = self._may_step
            for request in self._channel.receive(0 if busy else IDLE_MS):
                self._take(request)
            if self._may_step:
                self._step()
            else:
                self._check()  # otherwise a step would raise it
            if self._failures >= MOST_FAILURES:
                self._channel.send(Failed(f"{self._failures} steps in a row failed on the device", 1))
                return 1
            self._tell_ability()
            self._send_stats(force=busy and not self._may_step)
        self.engine.close()
        return 0

    @property
    def _may_step(self) -> bool:
        return self.engine.has_work and not self._is_paused

    def _take(self, request: EngineRequest) -> None:
        if isinstance(request, GenerateRequest):
            self._generate(request)
        elif isinstance(request, Abort):
            self._abort(request)
        elif isinstance(request, Stop):
            self._send(self.engine.end_sample(request.request_id, request.index, request.cause))
        elif isinstance(request, Embed):
            self._embed(request)
        elif isinstance(request, Audit):
            self._channel.send(Done(request.request_id, problems=self._audit()))
        elif isinstance(request, Pause):
            self._pause(request)
        elif isinstance(request, Flush):
            self._channel.send(Done(request.request_id, self.engine.scheduler.flush_prefix_cache()))
        elif isinstance(request, Shutdown):
            self._shutting_down = True

    def _generate(self, request: GenerateRequest) -> None:
        prompt = unpack_ids(request.prompt)
        try:
            params = unpack_params(request.params)
            self.engine.add(request.request_id, prompt, params, request.seed, progress=request.progress)  # pyright: ignore[reportArgumentType]
        except (SglcoreError, SamplingError) as error:
            self._channel.send(Refused(request.request_id, str(error)))
            return
        self._requests += 1
        self._prompt_tokens += len(prompt)

    def _abort(self, request: Abort) -> None:
        embedding = self._embeds.pop(request.request_id, None)
        if embedding is not None:
            self.engine.scheduler.abort(embedding.rid)
        else:
            self._send(self.engine.abort(request.request_id))

    def _pause(self, request: Pause) -> None:
        """Pause or continue, and confirm it with `Done`. Before a pause is confirmed, steps in
        flight are collected and their outputs sent, so that nothing changes after the frontend gets
        the reply."""
        self._is_paused = request.is_paused
        if self._is_paused:
            try:
                outputs = self.engine.drain()
            except WorkerLost:
                raise
            except Exception as error:
                logging.exception("steps in flight could not be collected")
                outputs = self._after_failure(error)
            self._send(outputs)
            self._send_embeddings()
            self._send_stats(force=True)
        self._channel.send(Done(request.request_id))

    def _embed(self, request: Embed) -> None:
        try:
            ids, segments = unpack_ids(request.prompt), unpack_ids(request.segments) if request.segments else None
            embedding = self.engine.embed(request.request_id, ids, segments)  # pyright: ignore[reportArgumentType]
        except SglcoreError as error:
            self._channel.send(Refused(request.request_id, str(error)))
            return
        self._embeds[request.request_id] = embedding
        self._requests += 1
        self._prompt_tokens += len(embedding.prompt_ids)

    def _step(self) -> None:
        begin, only_waited = time.perf_counter(), self.engine.only_waits
        try:
            outputs = self.engine.step()
            self._failures = 0
        except WorkerLost:
            raise
        except Exception as error:
            logging.exception("a step failed")
            outputs = self._after_failure(error)
        self._send(outputs)
        self._send_embeddings()
        if only_waited and self.engine.only_waits:
            return
        self._step_seconds += time.perf_counter() - begin
        self._host_steps += 1

    def _after_failure(self, error: Exception) -> list[EngineOutput]:
        """Count a failed step, collect the steps in flight, and return their outputs, among them
        the ends of requests that failed; other requests continue. If nothing can be collected,
        returns nothing and makes `run` give up. `error`: why the step failed, for the log."""
        self._failures += 1
        self._failed_steps += 1
        try:
            return self.engine.drain()
        except Exception:
            logging.exception("steps in flight could not be collected after: %s", error)
            self._failures = MOST_FAILURES
            return []

    def _send(self, outputs: list[EngineOutput]) -> None:
        if outputs:
            self._generated += sum(len(each.token_ids) for each in outputs)
            self._channel.send(EngineOutputs(outputs))

    def _send_embeddings(self) -> None:
        for name, request in list(self._embeds.items()):
            if request.state is State.FINISHED:
                del self._embeds[name]
                vector = b"" if request.embedding is None else request.embedding.astype("<f4").tobytes()
                self._channel.send(Embedded(name, vector, "" if vector else request.error or "aborted"))

    def _tell_ability(self) -> None:
        lacks = self.engine.lacks
        if lacks != self._lacks:
            self._lacks = lacks
            self._channel.send(Able(lacks))

    def _audit(self) -> list[str]:
        try:
            self.engine.scheduler.audit()
        except AssertionError as error:
            return [str(error) or "the audit failed without a message"]
        return []

    def _send_stats(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now >= self._next_stats:
            self._next_stats = now + STATS_EVERY
            self._channel.send(self.stats())

    def stats(self) -> EngineStats:
        """Return a new record of the current counters and the present load; does not wait."""
        swaps = self._meter.swaps
        return EngineStats(
            **structs.asdict(self.engine.scheduler.stats()),
            compiling=self.engine.num_compiling,
            failed_steps=self._failed_steps,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
            host_seconds=max(self._step_seconds - self._meter.device_seconds + self._device_before, 0.0),
            host_steps=self._host_steps,
            step_seconds=self._step_seconds,
            paths=dict(self._meter.paths),
            drafts=dict(self.engine.scheduler.drafts - self._drafts_before),
            swap_rows=swaps.rows,
            swap_hits=swaps.hits,
            swap_waits=swaps.waits,
            loaded_bytes=swaps.loaded,
            stored_bytes=swaps.stored,
        )
