"""Real engine processes that are killed, cannot start, or lose their parent, on the server's event
loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import uvloop

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.engine.start import embedded_model
from sglcore.sampling.params import SamplingParams
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.engine_launch import LocalProcess
from sglcore.serving.replicas.prompt_generation import Generation
from sglcore.serving.replicas.server_errors import EngineDied, NotReady, ShuttingDown
from tests.serving.staged_replicas import until

PROMPT = "Once upon a time"
PATIENCE = 120.0
LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12, seed=11)
WHOLE = SamplingParams(max_tokens=300, ignore_eos=True, seed=11)


@asynccontextmanager
async def running_frontend(**settings: object) -> AsyncIterator[Frontend]:
    """A frontend with ready engines of two request slots each; at the end none of its processes is
    left."""
    config = EngineConfig(dtype="float32", max_requests=2, threads=1, kv_cache_memory=64 << 20)
    frontend = Frontend(config, ServerConfig(**settings))  # pyright: ignore[reportArgumentType]
    pids: set[int] = set()
    await frontend.start()
    try:
        await ready(frontend)
        yield frontend
        pids |= set(processes(frontend).values())
    finally:
        await frontend.stop()
    assert not [pid for pid in pids if is_running(pid)]


async def ready(frontend: Frontend) -> None:
    """Wait until the frontend answers."""
    while not frontend.health.ready:
        assert not frontend.supervisor.stopped.is_set(), frontend.health.reason
        await asyncio.sleep(0.01)


def processes(frontend: Frontend) -> dict[int, int]:
    """The engines' process ids by replica."""
    found = {replica.number: replica.process for replica in frontend.supervisor.replicas.values()}
    return {number: process.pid for number, process in found.items() if isinstance(process, LocalProcess)}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def begin(frontend: Frontend, params: SamplingParams = LONG) -> Generation:
    return await frontend.generate(PROMPT, params)


async def text_of(generation: Generation) -> str:
    return (await asyncio.wait_for(generation.wait(), PATIENCE)).outputs[0].text


def test_a_killed_engine_fails_all_that_it_had_and_the_server_is_to_end() -> None:
    async def play() -> None:
        async with running_frontend() as frontend:
            streamed, other, queued = [await begin(frontend) for _ in range(3)]
            await streamed.__anext__()
            os.kill(processes(frontend)[0], signal.SIGKILL)
            for generation in (streamed, other, queued):
                with pytest.raises(EngineDied, match="signal 9"):
                    await text_of(generation)
            assert (frontend.health.phase, frontend.health.live) == ("dead", False)
            assert frontend.supervisor.stopped.is_set() and frontend.supervisor.exit_code == 1
            with pytest.raises(ShuttingDown, match="signal 9"):
                await begin(frontend)

    uvloop.run(play())


def test_an_engine_that_is_started_again_answers_whom_nobody_told_a_part_as_if_nothing_had_happened() -> None:
    async def play() -> None:
        async with running_frontend(restart=True) as frontend:
            expected = await text_of(await begin(frontend, SHORT))
            streamed, whole = await begin(frontend), await begin(frontend, WHOLE)
            answer = asyncio.create_task(text_of(whole))
            await streamed.__anext__()
            await until(lambda: len(whole.output.outputs[0].token_ids) > 1, PATIENCE)
            queued = await begin(frontend, SHORT)
            killed = processes(frontend)[0]
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(EngineDied, match="part of the answer"):
                await text_of(streamed)
            assert not frontend.health.ready and frontend.health.live
            new = await begin(frontend, SHORT)
            assert await text_of(queued) == await text_of(new) == expected
            assert (await answer).startswith(expected) and whole.tries == 2
            assert frontend.health.ready and processes(frontend)[0] != killed
            assert await frontend.audit() == []

    uvloop.run(play())


def test_the_other_replica_goes_on_and_takes_what_had_waited() -> None:
    async def play() -> None:
        async with running_frontend(replicas=2) as frontend:
            expected = await text_of(await begin(frontend, SHORT))
            running = [await begin(frontend) for _ in range(4)]
            for generation in running:
                await generation.__anext__()
            queued = [await begin(frontend, SHORT) for _ in range(2)]
            replicas = frontend.supervisor.replicas
            lost = [each for each in running if each.request_id in replicas[0].generations]
            kept = [each for each in running if each not in lost]
            assert len(lost) == 2 and len(replicas[0].generations) == 3, "one waits at each"
            os.kill(processes(frontend)[0], signal.SIGKILL)
            for generation in lost:
                with pytest.raises(EngineDied, match="part of the answer"):
                    await text_of(generation)
            assert frontend.health.ready
            kept[0].abort()
            assert [await text_of(generation) for generation in queued] == [expected, expected]
            await kept[1].__anext__()
            kept[1].abort()
            await until(lambda: len(frontend.supervisor.ready) == 2, PATIENCE)
            assert await frontend.audit() == []

    uvloop.run(play())


def test_a_stopped_engine_is_killed_and_replaced_and_no_request_is_lost_that_nobody_was_told_of() -> None:
    async def play() -> None:
        async with running_frontend(replicas=2, heartbeat_timeout=6.0) as frontend:
            expected = await text_of(await begin(frontend, SHORT))
            stopped = processes(frontend)[0]
            os.kill(stopped, signal.SIGSTOP)
            queued = [await begin(frontend, SHORT) for _ in range(4)]
            assert [await text_of(generation) for generation in queued] == [expected] * 4
            await until(lambda: len(frontend.supervisor.ready) == 2 and processes(frontend)[0] != stopped, PATIENCE)
            assert not is_running(stopped) and frontend.supervisor.deaths >= 1
            assert await frontend.audit() == []

    uvloop.run(play())


def test_an_audit_that_nobody_could_answer_does_not_say_that_all_is_well() -> None:
    async def play() -> None:
        frontend = Frontend(EngineConfig(), ServerConfig())
        with pytest.raises(NotReady, match="starting"):
            await frontend.audit()
        await frontend.stop()

    uvloop.run(play())


def test_a_checkpoint_that_can_not_be_loaded_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    for file in embedded_model().iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())

    async def play() -> None:
        frontend = Frontend(EngineConfig(model=str(tmp_path)), ServerConfig(restart=True))
        await frontend.start()
        await asyncio.wait_for(frontend.supervisor.stopped.wait(), PATIENCE)
        health, code = frontend.health, frontend.supervisor.exit_code
        await frontend.stop()
        assert (code, health.phase, health.ready) == (2, "dead", False)
        assert str(tmp_path) in health.reason and "\n" not in health.reason

    uvloop.run(play())


def test_an_engine_whose_frontend_is_killed_ends_by_itself() -> None:
    with subprocess.Popen([sys.executable, "-c", LONELY], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        parent.kill()
    with suppress(ProcessLookupError):
        asyncio.run(ended(engine))


async def ended(pid: int) -> None:
    """Wait until a process that is not a child has ended; raises ProcessLookupError if it is
    already gone."""
    descriptor, seen = os.pidfd_open(pid), asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, seen.set)
    await asyncio.wait_for(seen.wait(), PATIENCE)
    os.close(descriptor)


LONELY = """
import asyncio
from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.serving.replicas.engine_frontend import Frontend

async def main():
    frontend = Frontend(EngineConfig(max_requests=2, threads=1, kv_cache_memory=64 << 20), ServerConfig())
    await frontend.start()
    while not frontend.health.ready:
        await asyncio.sleep(0.01)
    print(frontend.supervisor.replicas[0].process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
