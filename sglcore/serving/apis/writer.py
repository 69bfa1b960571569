"""Writes the answer to a generating request: whole, or as the events of a stream. Each protocol has
its own writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from typing import Any, Generic, TypeVar

from fastapi import Response

from sglcore.serving.apis.answer import EVENTS, Stream, StreamForm, as_json, error_body, event
from sglcore.serving.apis.checks import check_generates, check_model, fingerprint
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.runs import Runs
from sglcore.serving.replicas.server_errors import told

Run = TypeVar("Run", bound=Runs)


class Writer(ABC, Generic[Run]):
    """The answer to one request."""

    def __init__(self, frontend: Frontend, name: str | None = None) -> None:
        """`name`: the requested model. Raises InvalidRequest if it is another model or generates no
        text, and NotReady."""
        self.model = check_model(frontend, name)
        check_generates(frontend)
        self._fingerprint = fingerprint(frontend)
        self._run: Runs | None = None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the engine that answers; before that, of the engine that may
        answer."""
        return (self._run.fingerprint if self._run is not None else "") or self._fingerprint

    @abstractmethod
    async def answer(self, run: Run) -> Any:
        """Return the whole answer; waits for all samples. Raises Unanswered if every one failed."""

    @abstractmethod
    def events(self, run: Run) -> AsyncGenerator[bytes, None]:
        """Yield the answer's parts as they come, and its end. Raises as `answer` does."""

    def on_error(self, error: Exception) -> bytes:
        """Return the event for an error after the first event."""
        return event(error_body(told(error)))

    @property
    def form(self) -> StreamForm:
        """Return how the parts of a stream are written."""
        return EVENTS

    async def respond(self, run: Run, streams: bool | None, warnings: Iterable[str]) -> Response | Stream:
        """Return the answer as it is sent. Waits for all of it unless it streams.

        `warnings`: fields of the request without effect, in addition to what the run does not
        enforce.
        """
        self._run = run
        if streams:
            return Stream(self.events(run), run, self.on_error, (*warnings, *run.unenforced), run.outputs, self.form)
        async with run:
            answer = await self.answer(run)
            return as_json(answer, (*warnings, *run.unenforced), run.outputs)
