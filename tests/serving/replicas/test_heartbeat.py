"""Replicas that hang, without heartbeats or in a step that never ends: others take over, and no
request waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas import replica as replica_module
from sglcore.serving.replicas.channel import FrontendChannel
from sglcore.serving.replicas.heartbeat import QUIET_TICKS, Heartbeat, Pulse
from sglcore.serving.replicas.ipc import (
    Able,
    Abort,
    Address,
    Audit,
    Done,
    EngineOutputs,
    Flush,
    GenerateRequest,
    Pause,
    Phase,
)
from sglcore.serving.replicas.replica import LONGEST_READ, ORDER_SECONDS
from sglcore.serving.replicas.server_errors import EngineDied, NotAnswering, NotReady, Unserved, failure
from tests.serving import idle_clock
from tests.serving.staged_replicas import PATIENCE, PlayedEngine, Stage, staged, until

SILENCE, STEP = 8, 30
"""Limits in seconds (one look per second) after which an engine is killed."""


def run(play: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(play, 2 * PATIENCE))


@asynccontextmanager
async def beating(count: int = 2, **settings: Any) -> AsyncIterator[tuple[Stage, list[PlayedEngine]]]:
    """A supervisor of played engines that are ready and have sent one heartbeat; only the test
    makes it look at them."""
    settings = {"heartbeat_timeout": float(SILENCE), "step_timeout": float(STEP), **settings}
    async with staged(replicas=count, **settings) as stage:
        assert stage.supervisor._looks is not None
        stage.supervisor._looks.cancel()
        engines = [await stage.ready_engine() for _ in range(count)]
        for engine in engines:
            await beat(stage, engine, 1)
        yield stage, engines


async def beat(stage: Stage, engine: PlayedEngine, rounds: int) -> None:
    """Send a heartbeat and wait until it has arrived."""
    pulse = stage.supervisor.replicas[engine.spec.replica]._pulse
    engine.beat(rounds)
    await until(lambda: pulse._rounds == rounds and pulse.silence == 0)


async def next_prompt(engine: PlayedEngine) -> str:
    """The id of the engine's next prompt; skips the pause state that is sent again to an engine
    that recovers."""
    while not isinstance(request := await asyncio.wait_for(engine.requests.get(), PATIENCE), GenerateRequest):
        assert request == Pause(request.request_id, False) if isinstance(request, Pause) else False, request
    return request.request_id


def silence(stage: Stage, ticks: int) -> None:
    """Make the supervisor look `ticks` times without any heartbeat."""
    for _ in range(ticks):
        stage.supervisor.tick()


async def looks(stage: Stage, ticks: int, *engines: PlayedEngine, first: int = 100, goes_on: bool = True) -> None:
    """Make the supervisor look while these engines send heartbeats; their rounds advance if
    `goes_on`."""
    for number in range(ticks):
        stage.supervisor.tick()
        for engine in engines:
            await beat(stage, engine, first + number * goes_on)


def test_a_silent_replica_is_given_no_requests_and_takes_them_again_when_it_is_heard() -> None:
    async def play() -> None:
        async with beating() as (stage, (hung, other)):
            await looks(stage, QUIET_TICKS, other)
            assert stage.supervisor.replicas[hung.spec.replica].state == "silent"
            assert stage.supervisor.health.ready, "one replica is left"
            for number in range(6):
                stage.submit(f"r{number}", number)
                assert (await other.next_request()).request_id == f"r{number}"
            hung.say(Phase("any word is a sign of life", 0, 0))
            await until(lambda: len(stage.supervisor.ready) == 2)
            stage.submit("back")
            assert await next_prompt(hung) == "back"

    run(play())


def test_a_replica_that_stays_silent_is_killed_and_replaced_and_what_it_had_is_given_to_another() -> None:
    async def play() -> None:
        async with beating() as (stage, (hung, other)):
            begun = stage.submit("begun")
            assert begun.request_id in stage.supervisor.replicas[hung.spec.replica].generations
            hung.emit("begun", 9)
            await begun.__anext__()
            stage.submit("elsewhere")
            queued = stage.submit("queued")
            assert queued.request_id in stage.supervisor.replicas[hung.spec.replica].generations
            await other.next_request()
            await looks(stage, SILENCE, other)
            assert not hung.has_ended
            stage.supervisor.tick()
            assert hung.has_ended and not other.has_ended
            with pytest.raises(EngineDied, match="no sign of life for 8 s .*part of the answer had been given"):
                await begun.wait()
            assert (await other.next_request()).request_id == queued.request_id
            assert (await stage.ready_engine()).spec.replica == hung.spec.replica

    run(play())


def test_readiness_is_down_while_all_are_silent_and_what_comes_waits() -> None:
    async def play() -> None:
        async with beating(1, restart=True) as (stage, (engine,)):
            silence(stage, QUIET_TICKS - 1)
            assert stage.supervisor.health.ready
            silence(stage, 1)
            assert (stage.supervisor.health.phase, stage.supervisor.health.ready) == ("silent", False)
            waiting = stage.submit("waits")
            assert engine.requests.empty()
            await beat(stage, engine, 2)
            await until(lambda: stage.supervisor.health.ready)
            assert await next_prompt(engine) == waiting.request_id

    run(play())


def test_a_single_silent_engine_ends_the_server_as_one_that_died() -> None:
    async def play() -> None:
        async with beating(1) as (stage, _):
            request = stage.submit("lost")
            silence(stage, SILENCE + 1)
            with pytest.raises(EngineDied, match="no sign of life"):
                await request.wait()
            await asyncio.wait_for(stage.supervisor.stopped.wait(), PATIENCE)
            assert stage.supervisor.exit_code == 1

    run(play())


def test_a_replica_in_one_step_for_seconds_is_the_last_choice_and_is_killed_at_its_limit() -> None:
    async def play() -> None:
        async with beating() as (stage, (slow, other)):
            await beat(stage, slow, 100)
            for number in range(QUIET_TICKS):
                await looks(stage, 1, slow, goes_on=False)
                await beat(stage, other, number)
            for number in range(4):
                stage.submit(f"r{number}", number)
                assert (await other.next_request()).request_id == f"r{number}"
            assert len(stage.supervisor.ready) == 2
            pulse = stage.supervisor.replicas[slow.spec.replica]._pulse
            number = 200
            while pulse.standstill < STEP:
                number += 1
                stage.supervisor.tick()
                await beat(stage, slow, 100)
                await beat(stage, other, number)
            assert not slow.has_ended
            stage.supervisor.tick()
            assert slow.has_ended and not other.has_ended
            await until(lambda: stage.supervisor.deaths == 1)

    run(play())


def test_where_all_are_in_a_long_step_requests_are_given_to_them() -> None:
    async def play() -> None:
        async with beating(1) as (stage, (engine,)):
            await looks(stage, QUIET_TICKS + 1, engine, goes_on=False)
            stage.submit("r")
            assert (await engine.next_request()).request_id == "r"

    run(play())


@pytest.mark.parametrize("limit", [float(SILENCE), LONGEST_READ, LONGEST_READ + 30])
def test_a_start_may_be_silent_for_longer_and_before_its_first_word_for_ever(limit: float) -> None:
    async def play() -> None:
        async with staged(replicas=2, heartbeat_timeout=limit) as stage:
            assert stage.supervisor._looks is not None
            stage.supervisor._looks.cancel()
            begun, waits = await stage.launched(), await stage.launched()
            await beat(stage, begun, 0)
            silence(stage, int(max(limit, LONGEST_READ)))
            assert not begun.has_ended
            silence(stage, 1)
            assert begun.has_ended and not waits.has_ended

    run(play())


def test_the_step_that_a_start_was_in_is_no_step_of_its_loop() -> None:
    async def play() -> None:
        async with staged(step_timeout=float(STEP), heartbeat_timeout=float(SILENCE)) as stage:
            assert stage.supervisor._looks is not None
            stage.supervisor._looks.cancel()
            engine = await stage.launched()
            await looks(stage, STEP + 2, engine, goes_on=False)
            assert not engine.has_ended
            engine.become_ready()
            await until(lambda: bool(stage.supervisor.ready))
            stage.supervisor.tick()
            assert not engine.has_ended and not stage.supervisor.ready[0].is_still

    run(play())


def test_an_engine_that_lacks_something_gets_no_requests_until_it_says_that_it_does_not() -> None:
    async def play() -> None:
        async with beating() as (stage, (lacking, other)):
            waiting = stage.supervisor
            lacking.say(Able("no prompt engine"))
            await until(lambda: len(waiting.ready) == 1)
            assert waiting.health.ready
            for number in range(3):
                stage.submit(f"r{number}", number)
                assert (await other.next_request()).request_id == f"r{number}"
            other.say(Able("no prompt engine"))
            await until(lambda: not waiting.ready)
            assert waiting.health.snapshot() | {"elapsed_s": 0} == {
                "phase": "unable", "done": 0, "total": 0, "elapsed_s": 0, "reason": "no prompt engine",
            }  # fmt: skip
            with pytest.raises(NotReady, match="unable: no prompt engine"):
                stage.submit("refused")
            lacking.say(Able(""))
            await until(lambda: waiting.health.ready)
            assert "reason" not in waiting.health.snapshot()
            stage.submit("again")
            assert await next_prompt(lacking) == "again"

    run(play())


def test_what_waits_for_a_silent_replica_is_refused_when_it_says_that_it_lacks_something() -> None:
    async def play() -> None:
        async with beating(1, restart=True) as (stage, (engine,)):
            silence(stage, QUIET_TICKS)
            waiting = stage.submit("waits")
            engine.say(Able("no prompt engine"))
            with pytest.raises(NotReady, match="no prompt engine"):
                await waiting.wait()

    run(play())


def test_what_nothing_was_made_of_is_answered_by_503_and_its_other_samples_are_ended() -> None:
    async def play() -> None:
        async with beating(1) as (stage, (engine,)):
            request = stage.submit("r")
            await engine.next_request()
            engine.say(EngineOutputs([EngineOutput("r", 0, [], "error", None, "no prompt engine", is_unserved=True)]))
            with pytest.raises(Unserved, match="no prompt engine") as told:
                await request.wait()
            found = failure(told.value)
            assert found is not None and (found.status, found.headers["retry-after"]) == (503, "1")
            assert await engine.requests.get() == Abort("r")

    run(play())


def test_a_process_that_can_not_be_killed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "UNKILLABLE_SECONDS", 0.01)

    async def play() -> None:
        async with beating() as (stage, (stuck, _)):
            request = stage.submit("lost")
            await stuck.next_request()
            stuck.emit("lost", 9)
            await request.__anext__()
            monkeypatch.setattr(stuck, "kill", lambda code=-9: None)
            silence(stage, SILENCE + 1)
            with pytest.raises(EngineDied, match="was killed, and has not ended in"):
                await request.wait()
            monkeypatch.undo()
            stuck.kill()

    run(play())


def orders(supervisor: Any) -> dict[str, Any]:
    """Orders that wait for all replicas."""
    return {"audit": supervisor.audit, "flush": supervisor.flush, "pause": lambda: supervisor.pause(True)}


@pytest.mark.parametrize("name", ["audit", "flush", "pause"])
@pytest.mark.parametrize("is_silent", [True, False])
def test_an_order_is_followed_by_the_others_and_says_who_did_not(
    name: str, is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "ORDER_SECONDS", 2 * PATIENCE if is_silent else 0.5)

    async def play() -> None:
        async with beating() as (stage, (hung, other)):
            await looks(stage, QUIET_TICKS, other)
            if not is_silent:
                await beat(stage, hung, 2)
            ordered = asyncio.ensure_future(orders(stage.supervisor)[name]())
            while not isinstance(request := await other.requests.get(), Audit | Flush | Pause):
                pass
            other.say(Done(request.request_id))
            try:
                said = str(await asyncio.wait_for(ordered, PATIENCE))
            except NotAnswering as error:
                said, told = str(error), failure(error)
                assert told is not None
                assert (told.status, told.code, "retry-after" in told.headers) == (503, "not_answering", True)
            why = "no sign of life for 5 s" if is_silent else "not answered a command"
            assert f"replica {hung.spec.replica}" in said and why in said
            assert f"replica {other.spec.replica}" not in said

    idle_clock.run(play(), PATIENCE)


def test_a_replica_that_is_heard_again_is_told_of_the_pause_that_it_missed() -> None:
    async def play() -> None:
        async with beating(1) as (stage, (engine,)):
            silence(stage, QUIET_TICKS)
            with pytest.raises(NotAnswering):
                await stage.supervisor.pause(True)
            await beat(stage, engine, 2)
            request = await asyncio.wait_for(engine.requests.get(), PATIENCE)
            assert isinstance(request, Pause) and request.is_paused

    run(play())


def test_a_stop_waits_for_no_pause_that_an_engine_does_not_follow() -> None:
    async def play() -> None:
        async with beating(1) as (stage, (engine,)):
            silence(stage, QUIET_TICKS)
            await beat(stage, engine, 2)
            await until(lambda: bool(stage.supervisor.ready))
            begin = asyncio.get_running_loop().time()
            await stage.supervisor.stop()
            assert asyncio.get_running_loop().time() - begin < ORDER_SECONDS / 2

    idle_clock.run(play(), PATIENCE)


@pytest.mark.parametrize("seconds", [0.25, 1.0])
def test_an_engine_that_does_not_end_is_killed_when_the_time_is_over_that_the_server_was_told(seconds: float) -> None:
    async def play() -> None:
        async with staged(shutdown_timeout=seconds) as stage:
            engine = await stage.ready_engine()
            engine.is_deaf = True
            begin = asyncio.get_running_loop().time()
            await stage.supervisor.stop()
            assert engine.has_ended
            assert seconds <= asyncio.get_running_loop().time() - begin < seconds + 2.0

    idle_clock.run(play(), 600.0)


def test_time_that_the_frontend_slept_through_is_one_look() -> None:
    pulse = Pulse()
    pulse.tick()
    assert pulse.silence == 0, "nothing counts before the first heartbeat"
    pulse.beat(1)
    pulse.tick()
    assert (pulse.silence, pulse.is_silent) == (1, False)


def test_heartbeats_come_from_a_thread_of_their_own_with_the_rounds_of_the_loop(tmp_path: Path) -> None:
    async def play() -> None:
        context = zmq.asyncio.Context()
        channel = FrontendChannel(context, f"ipc://{tmp_path}/e")
        heartbeat = Heartbeat(Address(channel.endpoint, channel.beats), seconds=0.001)
        first = await asyncio.wait_for(channel.beat(), PATIENCE)
        for _ in range(3):
            heartbeat.count()
        while (await asyncio.wait_for(channel.beat(), PATIENCE)).rounds != 3:
            pass
        assert first.rounds == 0
        channel.close()
        heartbeat.close()
        heartbeat.close()
        context.destroy(linger=0)

    run(play())
