"""One prompt in the server: the engine's outputs arrive as they are made, and a reader takes their
text.

Unread text is joined into one delta, so a slow reader delays no other request and keeps only its
own text in memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import chain
from types import TracebackType

import numpy as np

from sglcore.engine.output_processor import OutputProcessor
from sglcore.engine.outputs import PromptProgress, RequestOutput, TextDelta
from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas.ipc import Abort, EngineRequest, GenerateRequest, Stop
from sglcore.serving.replicas.metrics.server_metrics import RequestClock
from sglcore.serving.replicas.server_errors import InvalidRequest, Overloaded, Unserved


class Generation:
    """The generation for one prompt: an async iterator of TextDelta and PromptProgress for one
    consumer, and an async context manager; leaving the context ends all running samples. Unread
    deltas of a sample are joined. `output`: the whole output so far.

    Iterating raises the error that ended it from outside (EngineDied, or a refusal by the engine).
    """

    def __init__(self, request: GenerateRequest, processor: OutputProcessor, clock: RequestClock) -> None:
        self.request = request
        self.request_id = request.request_id
        self.caller = ""
        """The id of the HTTP request that it belongs to."""
        self.answer_id = ""
        """The id of the answer that it belongs to, with other prompts; empty: it is the only
        one."""
        self.output: RequestOutput = processor.output
        self.prompt_tokens = len(processor.output.prompt_token_ids)
        self.is_closed = False
        self.is_told = False
        """Whether a part of the output was read, so that a restart would repeat it."""
        self.tries = 0
        """Number of engines that have received the request."""
        self.fingerprint = ""
        """The fingerprint of the engine that runs it; empty if none does."""
        self._processor = processor
        self._clock = clock
        self._pending: dict[int, list[TextDelta]] = {}
        self._progress: PromptProgress | None = None
        self._processed = -1
        self._failure: Exception | None = None
        self._woken, self._closed = asyncio.Event(), asyncio.Event()
        self._last_token: dict[int, float] = {}
        """Arrival time of each sample's newest token."""
        self._send: Callable[[EngineRequest], None] = _to_nobody
        self._on_close: Callable[[Generation], None] = _nobody_waits
        self._told: list[Callable[[], None]] = []

    def bind(
        self, send: Callable[[EngineRequest], None], on_close: Callable[[Generation], None], fingerprint: str = ""
    ) -> None:
        """Set the engine that runs this generation from now on. `send` sends requests to that
        engine, without waiting; `on_close` is called once with the generation when it has ended;
        `fingerprint`: that of the engine."""
        self._send, self._on_close, self.fingerprint = send, on_close, fingerprint

    def when_closed(self, told: Callable[[], None]) -> None:
        """Register `told`, which is called once, on the event loop, when the generation has ended
        for any reason. One that has ended already calls nothing."""
        self._told.append(told)

    @property
    def first_token_at(self) -> float | None:
        """Time of the first token, by `time.perf_counter`; None: there is none yet."""
        return self._clock.first_token_at

    @property
    def is_over(self) -> bool:
        """Whether every sample has ended, or an error has ended all."""
        return self._failure is not None or self.output.finished

    def deliver(self, output: EngineOutput) -> None:
        """Add an output of the engine to `output`, and wake the reader; outputs after the end are
        ignored. A stop text or pattern is reported to the engine (`Stop`). Refusals end the
        generation with their error; an output that cannot be decoded to text ends its sample with
        "error". Raises neither."""
        if self.is_closed:
            return
        if output.is_progress:
            self._tell_progress(output.cached_tokens, output.processed)
            self._woken.set()
            return
        if output.refused and not any(sample.token_ids for sample in self.output.outputs):
            later = output.retry_after
            self.fail(Overloaded(output.error, retry_after=later) if later else InvalidRequest(output.error))
            return
        if output.is_unserved and not any(sample.token_ids for sample in self.output.outputs):
            self._send(Abort(self.request_id))  # other samples of it may still run
            self.fail(Unserved(output.error))
            return
        delta = self._processor.take(output)
        if delta is None:
            return
        if self.request.progress and not self._last_token:
            self._tell_progress(self.output.cached_tokens, self.prompt_tokens)
        self._time_tokens(delta.index, len(delta.token_ids))
        self._pending.setdefault(delta.index, []).append(delta)
        early = self._processor.early_end(output)
        if early is not None:
            self._send(Stop(self.request_id, *early))
        if self.output.finished:
            self._close(self._reason())
        self._woken.set()

    def restart(self) -> None:
        """Drop the outputs of an engine that has ended, so that another can run the request. Only
        before anything was read (`is_told`)."""
        assert not self.is_told
        self._processor.restart()
        self._clock.on_restart()
        self._pending.clear()
        self._last_token.clear()

    def fail(self, error: Exception) -> None:
        """End the generation with an error, if it has not ended.

        Iterating raises the error after the outputs that have arrived.
        """
        if not self.is_over:
            self._failure = error
            self._close(type(error).__name__)
        self._woken.set()

    def abort(self) -> None:
        """End the running samples, and tell the engine to free their slots. Idempotent; does not
        wait.

        The reader gets an end of each sample. If nothing was read and no sample has ended before,
        it gets nothing: such an answer has an HTTP status of its own.
        """
        if self.is_closed:
            return
        self._send(Abort(self.request_id))
        is_begun = self.is_told or any(completion.finish_reason for completion in self.output.outputs)
        for completion in self.output.outputs:
            if completion.finish_reason is None:
                completion.finish_reason = "abort"
                end = TextDelta(self.request_id, completion.index, "", (), "abort")
                self._pending.setdefault(completion.index, []).extend([end] * is_begun)
        self._close("abort")
        self._woken.set()

    async def ended(self) -> None:
        """Wait until every sample has ended, or an error has ended all, which is not raised here.
        Nothing is read, so that the request can be restarted as long as it runs."""
        await self._closed.wait()

    async def wait(self) -> RequestOutput:
        """Return the whole output; waits until every sample has ended. Raises the errors of
        iterating; a sample that failed by itself has its `finish_reason` "error"."""
        await self.ended()
        async for _ in self:
            pass
        return self.output

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> TextDelta | PromptProgress:
        while True:
            if self._progress is not None:
                progress, self._progress = self._progress, None
                return progress
            index = next((index for index, parts in self._pending.items() if any(map(_tells, parts))), None)
            if index is not None:
                self.is_told = True
                return joined(self._pending.pop(index))
            if self._failure is not None:
                raise self._failure
            if self.is_closed or self.output.finished:
                raise StopAsyncIteration
            self._woken.clear()
            await self._woken.wait()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _tell_progress(self, cached: int, processed: int) -> None:
        if processed > self._processed:
            self._processed = processed
            self._progress = PromptProgress(self.request_id, self.prompt_tokens, cached, processed)

    def _time_tokens(self, index: int, count: int) -> None:
        if not count:
            return
        before, now = self._last_token.get(index), time.perf_counter()
        self._last_token[index] = now
        if before is None:
            self._clock.on_first_tokens(count)
        else:
            self._clock.on_tokens(count, now - before)

    def _close(self, reason: str) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._closed.set()
            self._clock.on_prompt(self.prompt_tokens, self.output.cached_tokens)
            self._clock.on_end(reason)
            self._on_close(self)
            for told in self._told:
                told()

    def _reason(self) -> str:
        reasons = [completion.finish_reason or "" for completion in self.output.outputs]
        return next((reason for reason in ("error", "abort") if reason in reasons), reasons[0])


def _tells(delta: TextDelta) -> bool:
    """Return whether a delta is passed to the reader now. Tokens whose text is held back wait for
    more text."""
    return bool(delta.text or delta.logprobs or delta.finish_reason)


def joined(parts: Sequence[TextDelta]) -> TextDelta:
    """Return one delta with the text, tokens and log-probabilities of consecutive deltas of one
    sample, at least one, and the finish reason of the last."""
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    scored = [part.logprobs for part in parts if part.logprobs is not None]
    states = [part.hidden_states for part in parts if part.hidden_states is not None]
    return TextDelta(
        last.request_id,
        last.index,
        "".join(part.text for part in parts),
        tuple(chain.from_iterable(part.token_ids for part in parts)),
        last.finish_reason,
        tuple(chain.from_iterable(scored)) if scored else None,
        last.error,
        np.concatenate(states) if states else None,
    )


def _to_nobody(request: EngineRequest) -> None:
    """Drop the request: no engine has the generation yet."""


def _nobody_waits(generation: Generation) -> None:
    """Do nothing: no replica has the generation yet."""
