"""One replica at its edges: how its end is told, what it leaves, and when a request may wait for
it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.serving.replicas import replica as replica_module
from sglcore.serving.replicas.heartbeat import QUIET_TICKS, Pulse
from sglcore.serving.replicas.ipc import Able, Embed, Embedded, EngineStats, Failed, GenerateRequest, Pause, Refused
from sglcore.serving.replicas.replica import _cause
from sglcore.serving.replicas.restart import SHORT_LIFE, RestartPolicy
from sglcore.serving.replicas.server_errors import InvalidRequest, NotReady, ShuttingDown, Unanswered, failure
from tests.serving import idle_clock
from tests.serving.replicas.test_heartbeat import beating, looks, silence
from tests.serving.staged_replicas import PATIENCE, Stage, staged, until


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "exit code 0"),
        (1, "exit code 1"),
        (-9, "signal 9"),
        (-15, "signal 15"),
        (4, "lost its connection"),
        (3, "code 3"),
    ],
)
def test_an_end_is_told_by_its_signal_or_its_code(code: int, said: str) -> None:
    assert said in _cause(code)


@pytest.mark.parametrize(
    ("code", "failed", "words", "reason", "exit_code"),
    [
        (-9, None, "", "signal 9", 1),
        (3, None, "", "exit code 3", 1),
        (0, None, "", "exit code 0", 1),
        (-9, None, "the machine is gone", "the machine is gone", 1),
        (2, Failed("no checkpoint", 2), "", "no checkpoint", 2),
        (2, Failed("no checkpoint", 2), "the machine is gone", "no checkpoint", 2),
        (0, Failed("it failed", 0), "", "it failed", 1),
    ],
)
def test_the_reason_of_an_end_is_the_engines_own_word_then_the_launchers_then_the_code(
    code: int, failed: Failed | None, words: str, reason: str, exit_code: int
) -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine()
            engine.last_words = words
            engine.die(code, failed=failed)
            await asyncio.wait_for(stage.supervisor.stopped.wait(), PATIENCE)
            assert reason in stage.supervisor.health.reason and stage.supervisor.exit_code == exit_code
            assert stage.supervisor.deaths == 1

    asyncio.run(play())


def test_an_embedding_that_failed_or_was_refused_says_why_and_leaves_the_engine() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine(generates=False)
            (replica,) = stage.supervisor.ready

            async def answer(name: str, reply: Any) -> bytes:
                wanted = asyncio.ensure_future(stage.supervisor.embed(name, [5, 6], [0, 1]))
                request = await asyncio.wait_for(engine.requests.get(), PATIENCE)
                assert isinstance(request, Embed) and request.request_id == name and len(request.segments) == 8
                engine.say(reply)
                try:
                    return await asyncio.wait_for(wanted, PATIENCE)
                finally:
                    assert replica.load == 0

            assert await answer("a", Embedded("a", b"vector")) == b"vector"
            with pytest.raises(Unanswered, match="this embedding failed: planted") as failed:
                await answer("b", Embedded("b", b"", "planted"))
            found = failure(failed.value)
            assert found is not None and (found.status, found.code) == (500, "engine_error")
            with pytest.raises(InvalidRequest, match="too long"):
                await answer("c", Refused("c", "too long"))
            engine.say(Embedded("unknown", b"late"))
            engine.say(Refused("unknown", "late"))
            assert await answer("d", Embedded("d", b"next")) == b"next" and stage.supervisor.deaths == 0

    asyncio.run(play())


def test_a_request_that_the_engine_refuses_ends_alone() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine()
            refused, other = stage.submit("refused"), stage.submit("other")
            engine.say(Refused("refused", "it does not fit"))
            with pytest.raises(InvalidRequest, match="it does not fit"):
                await refused.wait()
            engine.emit("other", 9, reason="length")
            assert (await other.wait()).outputs[0].token_ids == [9]
            assert stage.supervisor.ready[0].load == 0

    asyncio.run(play())


async def states(stage: Stage, *names: str) -> None:
    await until(lambda: sorted(each.state for each in stage.supervisor.replicas.values()) == sorted(names))


def test_a_request_waits_as_long_as_one_replica_may_take_it_and_no_longer() -> None:
    async def play() -> None:
        async with beating(2) as (stage, (first, second)):
            first.say(Able("no prompt engine"))
            await states(stage, "unable", "ready")
            second.die()
            await until(lambda: not stage.supervisor.ready)
            waiting = stage.submit("waits")
            assert not waiting.is_closed, "another one is being started"
            again = await stage.launched()
            again.become_ready()
            assert (await again.next_request()).request_id == "waits"
            again.say(Able("no prompt engine either"))
            await states(stage, "unable", "unable")
            assert not waiting.is_closed, "what an engine has it keeps"
            with pytest.raises(NotReady, match="unable"):
                stage.submit("refused")
            again.emit("waits", 9, reason="length")
            assert (await waiting.wait()).outputs[0].token_ids == [9]

    asyncio.run(play())


def test_a_replica_that_recovers_while_another_still_starts_makes_no_server_ready() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            first, second = await stage.ready_engine(), await stage.launched()
            for lacks, state in (("no prompt engine", "unable"), ("", "ready")):
                first.say(Able(lacks))
                await states(stage, state, "starting")
                assert not stage.supervisor.health.ready and not stage.supervisor.health.started
            second.become_ready()
            await until(lambda: stage.supervisor.health.ready)

    asyncio.run(play())


def test_a_replica_that_is_silent_and_lacks_something_is_silent() -> None:
    async def play() -> None:
        async with beating(1, restart=True) as (stage, (engine,)):
            engine.say(Able("no prompt engine"))
            await states(stage, "unable")
            silence(stage, QUIET_TICKS)
            assert (stage.supervisor.replicas[0].state, stage.supervisor.health.phase) == ("silent", "silent")
            engine.say(Able("no prompt engine"))
            await states(stage, "unable")
            assert stage.supervisor.health.phase == "unable"

    asyncio.run(play())


def test_an_engine_that_lacks_something_is_told_to_end_and_is_not_killed() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine()
            engine.say(Able("no prompt engine"))
            await states(stage, "unable")
            await stage.supervisor.stop()
            assert await engine.wait() == 0

    asyncio.run(play())


def test_two_replicas_of_which_one_never_starts_end_the_server_though_the_other_does() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            await stage.ready_engine()
            second = await stage.launched()
            waiting = stage.submit("runs")
            second.die(2, failed=Failed("no device", 2))
            await asyncio.wait_for(stage.supervisor.stopped.wait(), PATIENCE)
            assert (stage.supervisor.exit_code, stage.supervisor.health.reason) == (2, "no device")
            assert not waiting.is_closed
            await stage.supervisor.stop()
            with pytest.raises(Exception, match="the server has ended before this request"):
                await waiting.wait()

    asyncio.run(play())


def test_checks_without_a_sign_of_life_are_silence_and_those_with_one_a_standstill() -> None:
    pulse = Pulse()
    pulse.beat(3)
    for count in range(1, QUIET_TICKS):
        pulse.tick()
        assert (pulse.silence, pulse.standstill, pulse.is_silent, pulse.is_still) == (count, count, False, False)
    pulse.tick()
    assert (pulse.is_silent, pulse.standstill) == (True, QUIET_TICKS - 1), "a silent process is not in a step"
    pulse.hear()
    assert (pulse.silence, pulse.is_silent) == (0, False)
    pulse.tick()
    assert pulse.is_still and pulse.standstill == QUIET_TICKS
    pulse.beat(3)
    assert pulse.is_still, "the same round"
    pulse.beat(2)
    assert (pulse.standstill, pulse.is_still) == (0, False), "any other round is a new one"
    for _ in range(QUIET_TICKS):
        pulse.tick()
        pulse.beat(2)
    assert pulse.is_still and not pulse.is_silent
    pulse.begin_rounds()
    assert (pulse.standstill, pulse.is_still) == (0, False)


def test_what_a_silent_replica_has_is_known_counted_and_given_up_with_the_rest() -> None:
    async def play() -> None:
        async with beating(2) as (stage, (quiet, other)):
            supervisor = stage.supervisor
            kept = stage.submit("kept")
            replica = supervisor.replicas[quiet.spec.replica]
            assert kept.request_id in replica.generations
            quiet.say(EngineStats(running=1, generation_tokens=5))
            await until(lambda: supervisor.stats().running == 1)
            embedding = asyncio.ensure_future(replica.embed("e", [5, 6]))
            await looks(stage, QUIET_TICKS, other)
            assert replica.state == "silent" and replica.load == 2
            assert supervisor.has("kept") and supervisor.generations == [kept]
            assert (supervisor.stats().running, supervisor.stats().generation_tokens) == (1, 5)
            supervisor.give_up(ShuttingDown("played"))
            for waiting in (kept.wait(), embedding):
                with pytest.raises(ShuttingDown, match="played"):
                    await asyncio.wait_for(waiting, PATIENCE)

    asyncio.run(play())


def test_a_replica_that_was_silent_is_told_of_a_pause_though_it_lacks_something() -> None:
    async def play() -> None:
        async with beating(1) as (stage, (engine,)):
            silence(stage, QUIET_TICKS)
            stage.supervisor.is_paused = True
            engine.say(Able("no prompt engine"))
            order = await asyncio.wait_for(engine.requests.get(), PATIENCE)
            assert isinstance(order, Pause) and order.is_paused
            await states(stage, "unable")
            engine.say(Able(""))
            await states(stage, "ready")
            stage.submit("next")
            request = await asyncio.wait_for(engine.requests.get(), PATIENCE)
            assert isinstance(request, GenerateRequest), "it has missed nothing since"

    asyncio.run(play())


@pytest.mark.parametrize("state", ["starting", "silent"])
def test_an_engine_that_starts_or_hangs_is_given_no_time_to_end(state: str) -> None:
    async def play() -> None:
        async with staged(shutdown_timeout=60.0) as stage:
            engine = await stage.launched()
            engine.is_deaf = True
            if state == "silent":
                engine.become_ready()
                engine.beat(1)
                await until(lambda: bool(stage.supervisor.ready) and stage.supervisor.replicas[0]._pulse._rounds == 1)
                silence(stage, QUIET_TICKS)
            assert stage.supervisor.replicas[0].state == state
            begin = asyncio.get_running_loop().time()
            await stage.supervisor.stop()
            assert engine.has_ended and asyncio.get_running_loop().time() - begin < 30.0
            assert engine.requests.empty()

    idle_clock.run(play(), 600.0)


def test_without_segments_an_engine_gets_none() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine(generates=False)
            for segments, size in ((None, 0), ([0, 0], 8)):
                wanted = asyncio.ensure_future(stage.supervisor.embed("e", [5, 6], segments))
                request = await asyncio.wait_for(engine.requests.get(), PATIENCE)
                assert isinstance(request, Embed) and (len(request.prompt), len(request.segments)) == (8, size)
                engine.say(Embedded("e", b"vector"))
                assert await wanted == b"vector"

    asyncio.run(play())


def test_a_replica_is_started_again_when_its_wait_is_over() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            stage.supervisor._restarts[0] = RestartPolicy(longest_wait=0.2)
            loop, waits = asyncio.get_running_loop(), list[float]()
            for _ in range(2):
                engine = await stage.ready_engine()
                begin = loop.time()
                engine.die()
                await until(lambda: not stage._launched.empty())
                waits.append(loop.time() - begin)
            assert waits[0] < 0.2 <= waits[1], "the first short life is forgiven"

    idle_clock.run(play(), 600.0)


@pytest.mark.parametrize(("lived", "waits"), [(SHORT_LIFE - 1, 1.0), (SHORT_LIFE + 1, 0.0)])
def test_a_life_is_the_time_since_an_engine_was_ready(
    lived: float, waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(replica_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def play() -> None:
        async with staged(restart=True) as stage:
            policy = stage.supervisor._restarts[0] = RestartPolicy()
            policy.end(1.0, 1)
            engine = await stage.launched()
            now[0] += 2 * SHORT_LIFE
            engine.become_ready()
            await until(lambda: bool(stage.supervisor.ready))
            (replica,) = stage.supervisor.ready
            now[0] += lived
            engine.say(EngineStats(running=1))
            await until(lambda: replica.stats.running == 1)
            assert (replica.lived, replica.report_age) == (lived, 0.0)
            engine.die()
            await until(lambda: stage.supervisor.deaths == 1)
            assert policy.wait == waits and policy.may_go_on

    asyncio.run(play())
