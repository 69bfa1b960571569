"""One server from start to end over played parts: what each part is given, how it ends, and that
everything is closed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.serving.http import opentelemetry_spans as spans
from sglcore.serving.http import server as http
from tests.serving.clients.test_slow_clients import GET, run, served

TRACES = "http://127.0.0.1:4318"


class Played:
    """The parts of a server; `told` has what was done, in order, `given` what the loop got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, code: int = 0, clean: bool = True, fault: str = "") -> None:
        self.told: list[str] = []
        self.given: dict[str, Any] = {}
        self._clean, self._fault = clean, fault
        self.frontend: Any = SimpleNamespace(
            names=("m",),
            metrics=SimpleNamespace(lost_log_records=int, lost_spans=int),
            supervisor=SimpleNamespace(exit_code=code, stopped="stopped"),
            drain="drain",
            give_up="give up",
            start=self._does("start"),
            stop=self._does("stop"),
        )
        traces = SimpleNamespace(lost=5, close=lambda: self.told.append("close traces"))
        logs = SimpleNamespace(lost=3, close=lambda: self.told.append("close log"))
        monkeypatch.setattr(http, "settled", lambda config, options: SimpleNamespace(of=config))
        monkeypatch.setattr(http, "tls_of", lambda server: "tls")
        monkeypatch.setattr(http, "bind", lambda server: ["socket"])
        monkeypatch.setattr(http, "ChatFrontend", self._made)
        monkeypatch.setattr(spans, "Traces", lambda endpoint, model: self.told.append(f"{endpoint} {model}") or traces)
        monkeypatch.setattr(http, "Logs", lambda server: logs)
        monkeypatch.setattr(http, "running_app", self._app)
        monkeypatch.setattr(http, "with_middleware", lambda *given: given)
        monkeypatch.setattr(http, "run_server", self._run)

    def _does(self, name: str) -> Any:
        async def play() -> None:
            self.told.append(name)
            if self._fault == name:
                raise OSError("planted")

        return play

    def _made(self, config: Any, server: Any, *, chosen: Any) -> Any:
        self.given["config"], self.given["chosen"] = config.of, chosen
        return self.frontend

    @asynccontextmanager
    async def _app(self, frontend: Any) -> AsyncIterator[str]:
        self.told.append("app")
        try:
            yield "app"
        finally:
            self.told.append("end app")

    async def _run(self, app: Any, server: Any, **given: Any) -> bool:
        self.told.append("serve")
        self.given |= {"app": app, **given}
        if self._fault == "serve":
            raise OSError("planted")
        return self._clean

    def serve(self, on_listening: Any = None, **settings: Any) -> int:
        config = EngineConfig(model="m")
        found = http.serve(config, ServerConfig(**settings), chosen=("d",), on_listening=on_listening)
        return asyncio.run(found)


@pytest.mark.parametrize(
    ("code", "clean", "wanted"), [(0, True, 0), (0, False, http.UNANSWERED), (3, True, 3), (3, False, 3), (1, True, 1)]
)
def test_a_server_ends_by_its_engines_code_or_by_whether_all_was_answered(
    code: int, clean: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(monkeypatch, code=code, clean=clean)
    assert played.serve() == wanted
    assert played.told == ["app", "start", "serve", "end app", "stop", "close log"]


def test_each_part_is_given_what_it_needs_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    played, listening = Played(monkeypatch), list[Any]()
    assert played.serve(lambda *given: listening.append(given), otlp_traces_endpoint=TRACES) == 0
    given = played.given
    app, frontend, traces = given["app"]
    assert (app, frontend, traces.lost) == ("app", played.frontend, 5) and played.told[0] == f"{TRACES} m"
    assert (given["config"], given["chosen"]) == (EngineConfig(model="m"), ("d",))
    assert (given["tls"], given["sockets"], given["stopped"]) == ("tls", ["socket"], "stopped")
    assert (given["on_drain"], given["on_overdue"], given["metrics"]) == ("drain", "give up", played.frontend.metrics)
    given["on_listening"]("http://here")
    assert listening == [(played.frontend, "http://here")]
    metrics = played.frontend.metrics
    assert (metrics.lost_log_records(), metrics.lost_spans()) == (3, 5)
    assert played.told[-3:] == ["stop", "close traces", "close log"]


def test_without_traces_no_span_is_lost_and_nothing_has_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.serve()
    assert played.given["app"][2] is None and played.given["on_listening"] is None
    assert played.frontend.metrics.lost_spans() == 0


@pytest.mark.parametrize("fault", ["start", "serve"])
def test_a_server_that_fails_closes_all_that_it_had_opened(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, fault=fault)
    with pytest.raises(OSError, match="planted"):
        played.serve(otlp_traces_endpoint=TRACES)
    assert played.told[-4:] == ["end app", "stop", "close traces", "close log"]


def test_a_server_that_is_told_twice_to_stop_gives_nothing_up_first() -> None:
    begun, overdue = asyncio.Event(), list[str]()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def work() -> None:
        async with served(held, on_overdue=lambda: overdue.append("overdue")) as server:
            _, writer = await server.connect()
            writer.write(GET)
            await begun.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            while not server.drained:
                await asyncio.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await server.task is False and not overdue
            writer.close()

    run(work())
