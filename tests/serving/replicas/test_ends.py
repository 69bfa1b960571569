"""The report when a server ends: what happened, whether it comes back, and what to do, true at that
time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.serving.replicas.channel import FrontendChannel, open_channel
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.ipc import Address, EngineStats, Failed
from sglcore.serving.replicas.replica import Replica
from sglcore.serving.replicas.restart import MOST_FAILED_STARTS
from sglcore.serving.replicas.server_errors import EngineDied, ShuttingDown, failure
from sglcore.serving.replicas.supervisor import Supervisor
from tests.serving.replicas.test_frontend import PARAMS, begin, staged_frontend
from tests.serving.replicas.test_heartbeat import SILENCE, beat, beating, looks
from tests.serving.staged_replicas import PATIENCE, PlayedEngine, Stage, staged, until

End = Callable[[Frontend, Stage, PlayedEngine], Awaitable[object]]


async def dies(frontend: Frontend, stage: Stage, engine: PlayedEngine) -> None:
    engine.die()


async def can_not_be_started(frontend: Frontend, stage: Stage, engine: PlayedEngine) -> None:
    engine.die()
    for _ in range(MOST_FAILED_STARTS):
        (await stage.launched()).die(1)


async def drains_too_long(frontend: Frontend, stage: Stage, engine: PlayedEngine) -> None:
    frontend.health.drain()
    frontend.give_up()


async def dies_while_it_drains(frontend: Frontend, stage: Stage, engine: PlayedEngine) -> None:
    frontend.health.drain()
    engine.die()


async def is_stopped(frontend: Frontend, stage: Stage, engine: PlayedEngine) -> None:
    await frontend.stop()


async def dies_while_it_is_paused(frontend: Frontend, stage: Stage, engine: PlayedEngine) -> None:
    frontend._may_start.clear()
    waiting = asyncio.ensure_future(begin(frontend))
    await until(lambda: frontend._open == 2)
    engine.die()
    with pytest.raises(ShuttingDown, match="signal 9"):
        await asyncio.wait_for(waiting, PATIENCE)


ENDS: MappingProxyType[str, tuple[End, dict[str, Any]]] = MappingProxyType(
    {
        "dies": (dies, {}),
        "dies and is started again": (dies, {"restart": True}),
        "one of two dies": (dies, {"replicas": 2}),
        "can not be started again": (can_not_be_started, {"restart": True}),
        "drains too long": (drains_too_long, {}),
        "drains too long, and would be started again": (drains_too_long, {"restart": True}),
        "dies while it drains": (dies_while_it_drains, {}),
        "dies while it drains, and would be started again": (dies_while_it_drains, {"restart": True}),
        "is stopped": (is_stopped, {"restart": True}),
        "dies while it is paused": (dies_while_it_is_paused, {}),
    }
)


async def comes_back(frontend: Frontend, stage: Stage) -> bool:
    """Whether /readyz answers 200 again, once a restarted engine has become ready."""
    ends = frontend.supervisor.stopped
    await until(lambda: ends.is_set() or frontend.health.phase == "draining" or not stage._launched.empty())
    if not stage._launched.empty() and not frontend.supervisor._ending.is_set():
        await stage.ready_engine()
    return frontend.health.ready


@pytest.mark.parametrize("name", ENDS)
def test_at_every_end_it_is_told_whether_the_server_comes_back(name: str) -> None:
    ends, settings = ENDS[name]

    async def play() -> None:
        async with staged_frontend(**settings) as (frontend, stage):
            for _ in range(settings.get("replicas", 1)):
                await stage.ready_engine()
            streamed = await begin(frontend)
            (replica,) = (each for each in frontend.supervisor.replicas.values() if each.generations)
            (engine,) = (each for each in stage.engines if each.spec.replica == replica.number)
            embedder: Replica | Supervisor = frontend.supervisor  # the supervisor tries again
            if ends is not can_not_be_started:
                engine.emit(streamed.request_id, 9)
                await streamed.__anext__()
                embedder = replica
            answers = asyncio.gather(streamed.wait(), embedder.embed("embedded", [5, 6]), return_exceptions=True)
            await asyncio.sleep(0)
            await ends(frontend, stage, engine)
            found: list[object] = list(await asyncio.wait_for(answers, PATIENCE))
            goes_on = await comes_back(frontend, stage)
            if not goes_on:
                with pytest.raises(ShuttingDown) as refused:
                    await asyncio.wait_for(frontend.generate([5, 6, 7], PARAMS), PATIENCE)
                found.append(refused.value)
            for error in found:
                assert isinstance(error, EngineDied | ShuttingDown), error
                told = failure(error)
                assert told is not None and told.status == 503 and told.code != "not_ready"
                assert ("/readyz" in told.message) == goes_on, told.message
                assert ("does not come back" in told.message) != goes_on, told.message
                assert "not ready" not in told.message and "retry-after" not in told.headers

    asyncio.run(play())


def test_a_server_ends_by_the_exit_code_of_the_replica_that_ended_it() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            first, second = [await stage.launched() for _ in range(2)]
            first.die(failed=Failed("a setting can not be used", 2))
            await until(stage.supervisor.stopped.is_set)
            for place in range(MOST_FAILED_STARTS):
                second = await stage.launched() if place else second
                second.die(failed=Failed("something else", 7))
            await until(lambda: stage.supervisor.deaths == 1 + MOST_FAILED_STARTS)
            assert stage.supervisor.exit_code == 2

    asyncio.run(play())


def test_a_channel_whose_engine_can_not_be_launched_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[FrontendChannel] = []

    def kept(*given: Any) -> tuple[FrontendChannel, Address]:
        channel, address = open_channel(*given)
        opened.append(channel)
        return channel, address

    monkeypatch.setattr("sglcore.serving.replicas.supervisor.open_channel", kept)

    async def play() -> None:
        async with staged(restart=True) as stage:
            engine = await stage.ready_engine()
            stage.refusal = OSError("planted")
            engine.die()
            await until(stage.supervisor.stopped.is_set)
            assert [each._socket.closed for each in opened[1:]] == [True] * MOST_FAILED_STARTS

    asyncio.run(play())


def test_an_engine_that_was_killed_gets_nothing_whatever_it_still_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with beating(2) as (stage, (stuck, other)):
            replica, kills = stage.supervisor.replicas[stuck.spec.replica], list[int]()
            monkeypatch.setattr(stuck, "kill", lambda code=-9: kills.append(code))
            await looks(stage, SILENCE + 1, other)
            assert kills == [-9]
            stuck.say(EngineStats(running=1))
            await until(lambda: replica.stats.running == 1)
            await beat(stage, stuck, 9)
            await looks(stage, 1, other, first=900)
            assert replica.state == "silent" and kills == [-9]
            for number in range(3):
                stage.submit(f"r{number}", number)
                assert (await other.next_request()).request_id == f"r{number}"
            monkeypatch.undo()
            stuck.kill()
            await until(lambda: stage.supervisor.deaths == 1)

    asyncio.run(play())
