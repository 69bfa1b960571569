"""The base of all writers of answers: each writes the answer to a generating request, whole or as
the events of a stream, in the form of one protocol."""

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
    """Writes the answer to one request; make one for each. `respond` is the entry; subclasses
    implement `answer` and `events`. `model`: the served name under which it answers."""

    def __init__(self, frontend: Frontend, name: str | None = None) -> None:
        """`name`: the requested model (None: the first served name). Raises InvalidRequest if it is
        not served or generates no text, and NotReady if no requests are accepted."""
        self.model = check_model(frontend, name)
        check_generates(frontend)
        self._fingerprint = fingerprint(frontend)
        self._run: Runs | None = None

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the engine that runs the request; before that is known, of the engine
        at the request's arrival."""
        return (self._run.fingerprint if self._run is not None else "") or self._fingerprint

    @abstractmethod
    async def answer(self, run: Run) -> Any:
        """Return the whole answer as a value to encode as JSON; waits for all samples. Raises
        Unanswered if all failed; the failure of some is in their part of the answer."""

    @abstractmethod
    def events(self, run: Run) -> AsyncGenerator[bytes, None]:
        """Yield the encoded parts of the answer as they are generated, and its end. Raises
        Unanswered if all samples failed, perhaps after some parts, unless the protocol has an event
        that says so."""

    def on_error(self, error: Exception) -> bytes:
        """Return the encoded event for an error that occurs after the first event. An error that is
        a defect of the server is logged, and the event has only an id."""
        return event(error_body(told(error)))

    @property
    def form(self) -> StreamForm:
        """The content type and keep-alive of a stream; here, those of server-sent events."""
        return EVENTS

    async def respond(self, run: Run, streams: bool | None, warnings: Iterable[str]) -> Response | Stream:
        """Return the response to send: with `streams` at once a `Stream`, else the whole answer,
        for which it waits. The run ends with the answer, also if it fails or the client leaves.

        `warnings`: names of request fields without effect, for a header; parts of schemas that the
        run does not enforce are added.
        """
        self._run = run
        if streams:
            return Stream(self.events(run), run, self.on_error, (*warnings, *run.unenforced), run.outputs, self.form)
        async with run:
            answer = await self.answer(run)
            return as_json(answer, (*warnings, *run.unenforced), run.outputs)
