"""A supervisor with engines played by the test: they send what the test says over the real channel,
and end when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.engine.output_processor import OutputProcessor
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput, FinishReason
from sglcore.serving.replicas.channel import use_keys
from sglcore.serving.replicas.ipc import (
    Beat,
    EngineOutputs,
    EngineReply,
    EngineRequest,
    EngineSpec,
    Failed,
    GenerateRequest,
    ModelInfo,
    Ready,
    Shutdown,
    pack_ids,
    pack_params,
)
from sglcore.serving.replicas.metrics.health import Health
from sglcore.serving.replicas.prompt_generation import Generation
from sglcore.serving.replicas.supervisor import Supervisor
from sglcore.worker.model_worker import Limits

DEMO = Path(__file__).parents[2] / "sglcore" / "assets" / "demo"
PATIENCE = 120.0
"""Seconds after which a test gives up."""


def info(*, generates: bool = True, fingerprint: str = "fp_0") -> ModelInfo:
    """A played engine's information about its model."""
    limits = asdict(Limits(1024, 8, 16, 64, 1024, 2000, generates=generates))
    return ModelInfo("played", "", "", "0", (), limits, 1024, generates, (), {}, fingerprint)


class PlayedEngine:
    """An engine without a process."""

    last_words = ""

    def __init__(self, spec: EngineSpec, variables: Mapping[str, str], context: zmq.asyncio.Context) -> None:
        self.spec, self.variables = spec, variables
        self.name = f"played {spec.replica}"
        self.is_deaf = False
        """Whether it ignores the order to end."""
        self.requests: asyncio.Queue[EngineRequest] = asyncio.Queue()
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._socket = context.socket(zmq.PAIR)
        use_keys(self._socket, spec.address)
        self._socket.connect(spec.address.endpoint)
        self._beats = context.socket(zmq.PUSH)
        use_keys(self._beats, spec.address)
        self._beats.connect(spec.address.beats)
        self._listener = asyncio.create_task(self._listen())

    def beat(self, rounds: int) -> None:
        """Send a heartbeat."""
        self._beats.send(msgspec.msgpack.encode(Beat(rounds)))

    def say(self, reply: EngineReply) -> None:
        """Send a reply."""
        self._socket.send(msgspec.msgpack.encode(reply))

    def become_ready(self, **known: object) -> None:
        """Report that the start succeeded."""
        self.say(Ready(info(**known)))  # pyright: ignore[reportArgumentType]

    def say_bytes(self, content: bytes) -> None:
        """Send bytes that may not be a valid reply."""
        self._socket.send(content)

    def emit(self, request_id: str, *token_ids: int, reason: FinishReason | None = None) -> None:
        """Send tokens of a request."""
        self.say(EngineOutputs([EngineOutput(request_id, 0, list(token_ids), reason)]))

    def die(self, code: int = -9, *, failed: Failed | None = None) -> None:
        """End without being told to, perhaps after a message."""
        if failed is not None:
            self.say(failed)
        self.kill(code)

    async def next_request(self) -> GenerateRequest:
        """The next request that it receives."""
        request = await asyncio.wait_for(self.requests.get(), PATIENCE)
        assert isinstance(request, GenerateRequest), request
        return request

    async def wait(self) -> int:
        """Wait for its end; return the exit code."""
        return await asyncio.shield(self._ended)

    def kill(self, code: int = -9) -> None:
        """End it."""
        if not self._ended.done():
            self._ended.set_result(code)
            self._listener.cancel()
            self._socket.close(1000)
            self._beats.close(0)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        return self._ended.done()

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(EngineRequest)
        while True:
            request = decoder.decode(await self._socket.recv())
            self.requests.put_nowait(request)
            if isinstance(request, Shutdown) and not self.is_deaf:
                return self.kill(0)


class Stage:
    """The launcher of played engines, and their supervisor."""

    def __init__(self, is_remote: bool) -> None:
        self.is_remote = is_remote
        self.engines: list[PlayedEngine] = []
        self.refusal: Exception | None = None
        self.closed = False
        self._launched: asyncio.Queue[PlayedEngine] = asyncio.Queue()
        self._context = zmq.asyncio.Context()
        self._codec = TextCodec(DEMO)
        self.supervisor: Supervisor

    async def frontend_host(self) -> str:
        """The address at which remote engines reach the supervisor."""
        assert self.is_remote
        return "127.0.0.1"

    async def launch(self, spec: EngineSpec, variables: Mapping[str, str]) -> PlayedEngine:
        """Make an engine that has not sent anything yet."""
        if self.refusal is not None:
            raise self.refusal
        engine = PlayedEngine(spec, variables, self._context)
        self.engines.append(engine)
        self._launched.put_nowait(engine)
        return engine

    async def close(self) -> None:
        """Do nothing: played engines hold no resources."""
        self.closed = True
        self._context.destroy(linger=0)

    async def launched(self) -> PlayedEngine:
        """The next engine that was launched."""
        return await asyncio.wait_for(self._launched.get(), PATIENCE)

    async def ready_engine(self, **known: object) -> PlayedEngine:
        """The next engine, after it became ready and the supervisor noticed."""
        engine = await self.launched()
        count = len(self.supervisor.ready)
        engine.become_ready(**known)
        await until(lambda: len(self.supervisor.ready) > count)
        return engine

    def submit(self, name: str, *token_ids: int) -> Generation:
        """A request that the supervisor has assigned to a replica."""
        params = SamplingParams(max_tokens=8)
        ids = list(token_ids or (5, 6, 7))
        processor = OutputProcessor(self._codec, name, None, ids, params, 3)
        generation = Generation(
            GenerateRequest(name, pack_ids(ids), pack_params(params), 3), processor, cast(Any, NoClock())
        )
        self.supervisor.submit(generation)
        return generation


class NoClock:
    """A request clock that counts nothing."""

    def on_prompt(self, tokens: int, cached: int) -> None:
        """Do nothing."""

    def on_first_tokens(self, count: int) -> None:
        """Do nothing."""

    def on_tokens(self, count: int, seconds: float) -> None:
        """Do nothing."""

    def on_restart(self) -> None:
        """Do nothing."""

    def on_end(self, reason: str) -> None:
        """Do nothing."""


@asynccontextmanager
async def staged(
    *, is_remote: bool = False, chosen: Sequence[str] = (), config: EngineConfig = EngineConfig(), **settings: object
) -> AsyncIterator[Stage]:
    """A started supervisor of played engines; at the end all of them have ended."""
    stage = Stage(is_remote)
    server = ServerConfig(**settings)  # pyright: ignore[reportArgumentType]
    stage.supervisor = Supervisor(config, server, Health(), chosen=chosen, launcher=stage, longest_wait=0.0)
    await stage.supervisor.start()
    try:
        yield stage
    finally:
        await stage.supervisor.stop()
    assert all(engine.has_ended for engine in stage.engines) and stage.closed


async def until(condition: Callable[[], bool], patience: float = PATIENCE) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(patience):
        while not condition():
            await asyncio.sleep(0.001)
