"""A frontend without an engine: one scripted generation, or a scripted error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx

from sglcore.config.server_config import ServerConfig
from sglcore.engine.outputs import Completion, RequestOutput, TextDelta
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.format import ChatFormat
from sglcore.serving.http.http_app import make_app
from sglcore.serving.replicas.ipc import EngineStats
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.metrics.server_metrics import Metrics

DEMO = Path(__file__).parents[2] / "sglcore" / "assets" / "demo"
Generate = Callable[..., Awaitable[Any]]


class StubGeneration:
    """Yields these deltas, then raises the fault if there is one."""

    def __init__(self, deltas: list[TextDelta], fault: Exception | None = None) -> None:
        self._deltas, self._fault = deltas, fault
        samples = [Completion(index, 7) for index in range(1 + max((delta.index for delta in deltas), default=0))]
        self.output = RequestOutput("r", None, [1, 2], samples)
        self.aborted = False

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        for delta in self._deltas:
            sample = self.output.outputs[delta.index]
            sample.text += delta.text
            sample.finish_reason, sample.error = delta.finish_reason, delta.error
            yield delta
        if self._fault is not None:
            raise self._fault

    async def ended(self) -> None:
        """Do nothing: the output is complete from the start."""

    async def wait(self) -> RequestOutput:
        async for _ in self:
            pass
        return self.output

    first_token_at: float | None = None

    def abort(self) -> None:
        self.aborted = True

    fingerprint = ""

    async def __aenter__(self) -> StubGeneration:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.abort()


def make_frontend(generate: Generate | None = None, *, health: Health | None = None) -> ChatFrontend:
    """A frontend of the embedded checkpoint without an engine; `generate` replaces its
    generation."""
    codec = TextCodec(DEMO)
    if health is None:
        health = Health()
        health.become_ready()
    info = SimpleNamespace(max_model_len=64, generates=True, fingerprint="fp_0123456789ab", limits={"vocab_size": 2147})

    async def tokenize(prompt: Any, *, special: bool = True, most: int | None = None) -> list[int]:
        return codec.encode(prompt, special=special)

    frontend = SimpleNamespace(
        config=ServerConfig(),
        codec=codec,
        format=ChatFormat.detect(codec),
        names=("demo",),
        created=1,
        health=health,
        info=info if health.ready else None,
        generate=generate,
        tokenize=tokenize,
        supervisor=SimpleNamespace(replicas={}),
        stats=EngineStats,
        sampling={},
        when_draining=lambda told: None,
        metrics=Metrics("demo", "1", lambda: ()),
    )
    return cast(ChatFrontend, frontend)


def gives(*deltas: TextDelta, fault: Exception | None = None) -> Generate:
    async def generate(*given: Any, **named: Any) -> StubGeneration:
        return StubGeneration(list(deltas), fault)

    return generate


def raises(error: Exception) -> Generate:
    async def generate(*given: Any, **named: Any) -> Any:
        raise error

    return generate


class Application:
    """An app over the frontend, without a socket: to make one takes longer than a request."""

    def __init__(self, frontend: ChatFrontend) -> None:
        self._app = make_app(frontend)

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        """Send one request; `_` in the name of a header stands for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, json=body, headers=named)

        return asyncio.run(ask())


def call(frontend: ChatFrontend, method: str, path: str, body: Any = None) -> httpx.Response:
    """Send one request to an app over the frontend, without a socket."""
    return Application(frontend).send(method, path, body)
