"""The loop of an engine process: take orders, run a step, send the news."""

from __future__ import annotations

import logging
import time

from sglcore.device.errors import SglcoreError
from sglcore.engine.meter import Meter
from sglcore.engine.tokens import TokenEngine
from sglcore.sampling.params import SamplingError
from sglcore.schedule.output import EngineOutput
from sglcore.schedule.request import Request, State
from sglcore.serving.channel import EngineChannel
from sglcore.serving.messages import (
    Abort,
    Ask,
    Audit,
    Audited,
    Embed,
    Embedded,
    EngineOutputs,
    EngineStats,
    Failed,
    Leave,
    Order,
    Refused,
    Stop,
    unpack_ids,
    unpack_params,
)

IDLE_MS = 500
"""How long an idle engine waits for an order before it looks at its clock."""
STATS_EVERY = 0.25
"""Seconds between two reports of the counters."""
MOST_FAILURES = 3
"""Steps in a row that may fail before the process gives up: the device is not going to recover."""


class EngineService:
    """One engine and its channel. `run` returns the exit code."""

    def __init__(self, engine: TokenEngine, meter: Meter, channel: EngineChannel) -> None:
        self.engine = engine
        self._meter = meter
        self._channel = channel
        self._embeds: dict[str, Request] = {}
        self._leaving = False
        self._failures = self._failed_steps = 0
        self._requests = self._prompt_tokens = self._generated = 0
        self._step_seconds = self._device_before = 0.0
        self._host_steps = 0
        self._next_stats = 0.0

    def run(self) -> int:
        """Serve until the front says to leave (0), or the device fails again and again (1)."""
        self._device_before = self._meter.device_seconds
        while not self._leaving:
            busy = self.engine.has_work
            for order in self._channel.receive(0 if busy else IDLE_MS):
                self._take(order)
            if self.engine.has_work:
                self._step()
            if self._failures >= MOST_FAILURES:
                self._channel.send(Failed(f"{self._failures} steps in a row failed on the device", 1))
                return 1
            self._report(force=busy and not self.engine.has_work)
        self.engine.close()
        return 0

    def _take(self, order: Order) -> None:
        if isinstance(order, Ask):
            self._ask(order)
        elif isinstance(order, Abort):
            self._abort(order)
        elif isinstance(order, Stop):
            self._send(self.engine.stop(order.request_id, order.index, order.cause))
        elif isinstance(order, Embed):
            self._embed(order)
        elif isinstance(order, Audit):
            self._channel.send(Audited(order.request_id, self._audit()))
        elif isinstance(order, Leave):
            self._leaving = True

    def _ask(self, order: Ask) -> None:
        prompt = unpack_ids(order.prompt)
        try:
            params = unpack_params(order.params)
            self.engine.add(order.request_id, prompt, params, order.seed, progress=order.progress)  # pyright: ignore[reportArgumentType]
        except (SglcoreError, SamplingError) as error:
            self._channel.send(Refused(order.request_id, str(error)))
            return
        self._requests += 1
        self._prompt_tokens += len(prompt)

    def _abort(self, order: Abort) -> None:
        request = self._embeds.pop(order.request_id, None)
        if request is not None:
            self.engine.scheduler.abort(request.rid)
        elif order.index < 0:
            self._send(self.engine.abort(order.request_id))
        else:
            self._send(self.engine.abort_sample(order.request_id, order.index))

    def _embed(self, order: Embed) -> None:
        try:
            (request,) = self.engine.embed([order.request_id], [unpack_ids(order.prompt)])  # pyright: ignore[reportArgumentType]
        except SglcoreError as error:
            self._channel.send(Refused(order.request_id, str(error)))
            return
        self._embeds[order.request_id] = request
        self._requests += 1
        self._prompt_tokens += len(request.prompt_ids)

    def _step(self) -> None:
        begin, only_compiles = time.perf_counter(), not self.engine.loop.has_work
        try:
            news = self.engine.step()
            self._failures = 0
        except Exception as error:
            logging.exception("a step failed")
            news = self._after_failure(error)
        self._send(news)
        if self._embeds:
            self._send_embeddings()
        if only_compiles and not self.engine.loop.has_work:
            return
        self._step_seconds += time.perf_counter() - begin
        self._host_steps += 1

    def _after_failure(self, error: Exception) -> list[EngineOutput]:
        """The requests of the failed step have ended with its error; the others go on."""
        self._failures += 1
        self._failed_steps += 1
        try:
            return self.engine.drain()
        except Exception:
            logging.exception("what was in flight could not be collected after: %s", error)
            self._failures = MOST_FAILURES
            return []

    def _send(self, news: list[EngineOutput]) -> None:
        if news:
            self._generated += sum(len(each.token_ids) for each in news)
            self._channel.send(EngineOutputs(news))

    def _send_embeddings(self) -> None:
        for name, request in list(self._embeds.items()):
            if request.state is State.FINISHED:
                del self._embeds[name]
                vector = b"" if request.embedding is None else request.embedding.astype("<f4").tobytes()
                self._channel.send(Embedded(name, vector, "" if vector else request.error or "aborted"))

    def _audit(self) -> list[str]:
        try:
            self.engine.scheduler.audit()
        except AssertionError as error:
            return [str(error) or "the audit failed without a word"]
        return []

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if force or now >= self._next_stats:
            self._next_stats = now + STATS_EVERY
            self._channel.send(self.stats())

    def stats(self) -> EngineStats:
        """The counters as they are now."""
        known = EngineStats.__struct_fields__
        found = {name: value for name, value in self.engine.scheduler.stats().items() if name in known}
        return EngineStats(
            **found,
            time=time.time(),
            compiling=self.engine.num_compiling,
            failed_steps=self._failed_steps,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
            host_seconds=max(self._step_seconds - self._meter.device_seconds + self._device_before, 0.0),
            host_steps=self._host_steps,
            step_seconds=self._step_seconds,
            paths=dict(self._meter.paths),
        )
