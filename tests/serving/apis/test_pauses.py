"""Pauses and drains that cross each other, and prompts that wait for their end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglcore.serving.replicas.heartbeat import QUIET_TICKS
from sglcore.serving.replicas.ipc import Able, Done, Embed, Embedded, Failed, Pause
from sglcore.serving.replicas.replica import ORDER_SECONDS
from sglcore.serving.replicas.server_errors import NotAnswering, NotReady
from tests.serving import idle_clock
from tests.serving.replicas.test_frontend import begin, staged_frontend
from tests.serving.replicas.test_heartbeat import beating, silence
from tests.serving.staged_replicas import PATIENCE, PlayedEngine, staged, until


async def followed(engine: PlayedEngine) -> bool:
    """Wait for the engine's next pause order and answer it; return whether it pauses."""
    while not isinstance(order := await asyncio.wait_for(engine.requests.get(), PATIENCE), Pause):
        pass
    engine.say(Done(order.request_id))
    return order.is_paused


def test_a_pause_that_waits_for_what_runs_is_over_when_the_server_is_told_to_go_on() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            runs = await begin(frontend)
            await engine.next_request()
            pausing = asyncio.create_task(frontend.pause("wait"))
            await until(lambda: frontend.is_paused)
            resuming = asyncio.create_task(frontend.resume())
            assert [await followed(engine) for _ in range(2)] == [False, False], "no engine is paused after all"
            await asyncio.wait_for(asyncio.gather(pausing, resuming), PATIENCE)
            assert not frontend.is_paused and not runs.is_closed
            runs.abort()

    asyncio.run(play())


def test_texts_to_embed_wait_for_the_end_of_a_pause() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine(generates=False)
            pausing = asyncio.create_task(frontend.pause("keep"))
            assert await followed(engine)
            await pausing
            asking = asyncio.ensure_future(frontend.pooled([([5, 6], None)]))
            await asyncio.sleep(0.02)
            assert engine.requests.empty() and not asking.done()
            resuming = asyncio.create_task(frontend.resume())
            orders: list[Any] = [await asyncio.wait_for(engine.requests.get(), PATIENCE) for _ in range(2)]
            for order in orders:
                engine.say(
                    Done(order.request_id) if isinstance(order, Pause) else Embedded(order.request_id, b"\0" * 4)
                )
            assert {type(order) for order in orders} == {Pause, Embed}
            await resuming
            assert [each.tokens for each in await asking] == [2]

    asyncio.run(play())


def test_a_drain_ends_a_pause_and_is_not_held_up_by_an_engine_that_does_not_follow() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            await stage.ready_engine()
            asked: list[bool] = []

            async def pause(is_paused: bool) -> None:
                asked.append(is_paused)
                if not is_paused:
                    raise NotAnswering("replica 0", "planted")

            frontend.supervisor.pause = pause
            await frontend.pause("keep")
            await asyncio.wait_for(frontend.drain(), PATIENCE)
            assert asked == [True, False] and frontend.health.phase == "draining" and not frontend.is_paused

    asyncio.run(play())


def test_a_server_that_goes_on_already_orders_nothing() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            await asyncio.wait_for(frontend.resume(), PATIENCE)
            assert engine.requests.empty()

    asyncio.run(play())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("length", [3, 4, 5])
def test_a_text_is_read_alike_in_the_loop_and_beside_it(
    special: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglcore.serving.replicas.engine_frontend.LONG_TEXT", 4)
    beside: list[str] = []
    real = asyncio.to_thread

    async def noted(work: Any, *given: Any, **named: Any) -> Any:
        beside.append("beside")
        return await real(work, *given, **named)

    monkeypatch.setattr(asyncio, "to_thread", noted)

    async def play() -> None:
        async with staged_frontend() as (frontend, _):
            text = "abcde"[:length]
            found = await frontend.tokenize(text, special=special)
            assert found == frontend.codec.encode(text, special=special)
            assert await frontend.tokenize([5, 6], special=special) == [5, 6]

    asyncio.run(play())
    assert len(beside) == (length > 4)


def test_what_waits_is_refused_when_the_only_replica_that_could_take_it_is_given_up() -> None:
    async def play() -> None:
        async with beating(2) as (stage, (first, second)):
            first.say(Able("no prompt engine"))
            await until(lambda: len(stage.supervisor.ready) == 1)
            second.die()
            await until(lambda: not stage.supervisor.ready)
            waiting = stage.submit("waits")
            (await stage.launched()).die(2, failed=Failed("no device", 2))
            with pytest.raises(NotReady, match="no prompt engine|restarting"):
                await asyncio.wait_for(waiting.wait(), PATIENCE)
            assert not stage.supervisor.stopped.is_set() and stage.supervisor.health.live

    asyncio.run(play())


def test_what_waits_for_a_silent_replica_alone_is_given_to_it_when_it_is_heard() -> None:
    async def play() -> None:
        async with beating(2) as (stage, engines):
            silence(stage, QUIET_TICKS)
            waiting = stage.submit("waits")
            assert stage.supervisor.health.phase == "silent" and not waiting.is_closed
            engines[1].say(Able(""))
            while getattr(await asyncio.wait_for(engines[1].requests.get(), PATIENCE), "request_id", "") != "waits":
                pass
            assert stage.supervisor.health.ready and waiting.request_id not in stage.supervisor._orphans

    asyncio.run(play())


def test_a_stop_waits_for_no_engine_that_starts_during_a_pause_and_does_not_follow_it() -> None:
    async def play() -> None:
        async with staged() as stage:
            stage.supervisor.is_paused = True
            await stage.ready_engine()
            begin = asyncio.get_running_loop().time()
            await stage.supervisor.stop()
            assert asyncio.get_running_loop().time() - begin < ORDER_SECONDS / 2

    idle_clock.run(play(), PATIENCE)
