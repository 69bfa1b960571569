"""Replicas that start, die, restart and are given up, and the fate of their requests."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.device.choice import ChosenDevice
from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas.channel import EngineChannel, FrontendChannel
from sglcore.serving.replicas.configs import with_whole_path
from sglcore.serving.replicas.engine_launch import launcher_for
from sglcore.serving.replicas.engine_process import LINK_BROKE
from sglcore.serving.replicas.ipc import Abort, Address, Embed, Embedded, EngineStats, Failed, Phase
from sglcore.serving.replicas.restart import LONGEST_WAIT, MOST_FAILED_STARTS, SHORT_LIFE, RestartPolicy
from sglcore.serving.replicas.server_errors import EngineDied, NotReady, ShuttingDown, Unanswered
from sglcore.serving.replicas.supervisor import MOST_TRIES
from tests.serving.staged_replicas import PATIENCE, info, staged, until

FAILED_HANDSHAKE = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def run(play: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(play, 2 * PATIENCE))


def test_a_supervisor_is_ready_when_all_that_it_began_with_are() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            health = stage.supervisor.health
            assert health.phase == "starting" and not health.ready
            await stage.ready_engine()
            assert not health.ready
            await stage.ready_engine()
            assert health.ready and stage.supervisor.info is not None

    run(play())


def test_a_start_shows_its_phases_and_takes_no_request() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.launched()
            engine.say(Phase("loading weights", 3, 9))
            await until(lambda: stage.supervisor.health.phase == "loading weights")
            snapshot = stage.supervisor.health.snapshot()
            assert (snapshot["done"], snapshot["total"]) == (3, 9)
            with pytest.raises(NotReady, match="loading weights"):
                stage.submit("early")

    run(play())


def test_a_single_engine_that_dies_fails_what_it_had_and_ends_the_server() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine()
            begun, queued = stage.submit("begun"), stage.submit("queued")
            engine.emit("begun", 9)
            await begun.__anext__()
            engine.die()
            for generation in (begun, queued):
                with pytest.raises(EngineDied, match="signal 9"):
                    await generation.wait()
            await asyncio.wait_for(stage.supervisor.stopped.wait(), PATIENCE)
            health = stage.supervisor.health
            assert (stage.supervisor.exit_code, health.live, health.ready) == (1, False, False)
            assert "signal 9" in health.reason

    run(play())


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_known_of_the_engines_is_what_one_that_runs_says(replicas: int) -> None:
    """A restarted engine may have less memory or other files."""

    async def play() -> None:
        async with staged(restart=True, replicas=replicas) as stage:
            supervisor = stage.supervisor
            engines = [await stage.ready_engine(fingerprint=f"fp_old{place}") for place in range(replicas)]
            assert supervisor.info is not None and supervisor.info.fingerprint == "fp_old0"
            for engine in engines:
                engine.die()
            await until(lambda: not supervisor.ready)
            await stage.ready_engine(fingerprint="fp_new")
            assert supervisor.info.fingerprint == "fp_new"
            for _ in engines[1:]:
                await stage.ready_engine(fingerprint="fp_other")
            assert supervisor.info.fingerprint == "fp_new", "another that comes later is named in the log"

    run(play())


def test_the_last_words_of_an_engine_are_the_reason_and_its_exit_code() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            (await stage.launched()).die(2, failed=Failed("no checkpoint in the folder", 2))
            await asyncio.wait_for(stage.supervisor.stopped.wait(), PATIENCE)
            assert (stage.supervisor.exit_code, stage.supervisor.health.reason) == (2, "no checkpoint in the folder")
            assert len(stage.engines) == 1, "the same configuration was tried again"

    run(play())


def test_a_start_that_fails_three_times_is_given_up() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            for _ in range(MOST_FAILED_STARTS):
                assert not stage.supervisor.stopped.is_set()
                (await stage.launched()).die(1)
            await asyncio.wait_for(stage.supervisor.stopped.wait(), PATIENCE)
            assert (len(stage.engines), stage.supervisor.exit_code) == (MOST_FAILED_STARTS, 1)

    run(play())


def test_an_engine_that_can_not_be_launched_again_is_a_failed_start() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            engine = await stage.ready_engine()
            stage.refusal = OSError("no memory for a process")
            engine.die()
            await asyncio.wait_for(stage.supervisor.stopped.wait(), PATIENCE)
            assert "no memory for a process" in stage.supervisor.health.reason

    run(play())


def test_what_has_begun_fails_and_what_waits_is_given_to_the_other_replica() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            dying, other = await stage.ready_engine(), await stage.ready_engine()
            requests = [stage.submit(f"r{index}", index) for index in range(4)]
            begun, queued = (
                request
                for request in requests
                if request.request_id in stage.supervisor.replicas[dying.spec.replica].generations
            )
            names = {(await other.next_request()).request_id for _ in range(2)}
            dying.emit(begun.request_id, 9)
            await begun.__anext__()
            dying.die()
            with pytest.raises(EngineDied, match="part of the answer had been given"):
                await begun.wait()
            assert stage.supervisor.health.ready, "one replica is left"
            again = await other.next_request()
            assert again.request_id == queued.request_id and again.request_id not in names
            other.emit(queued.request_id, 9, 10, reason="length")
            assert (await queued.wait()).outputs[0].token_ids == [9, 10]
            assert (await stage.ready_engine()).spec.replica == dying.spec.replica

    run(play())


def test_what_has_tokens_that_nobody_was_told_of_is_run_again_from_its_first() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            first = await stage.ready_engine()
            whole, silent = stage.submit("whole"), stage.submit("silent")
            waiting = asyncio.create_task(whole.wait())
            for name in ("whole", "silent"):
                first.emit(name, 9, 10)
            await until(lambda: bool(whole.output.outputs[0].token_ids and silent.output.outputs[0].token_ids))
            first.die()
            second = await stage.ready_engine()
            for name in ("whole", "silent"):
                second.emit(name, 4, 5, reason="stop")
            for output in (await waiting, await silent.wait()):
                assert output.outputs[0].token_ids == [4, 5]
            assert stage.supervisor.ready[0].load == 0

    run(play())


def test_what_waits_goes_to_the_replacement_when_nobody_else_is_there() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            first = await stage.ready_engine()
            queued = stage.submit("queued")
            first_try = await first.next_request()
            first.die()
            await until(lambda: stage.supervisor.health.phase == "restarting")
            new = stage.submit("new")
            second = await stage.ready_engine()
            assert stage.supervisor.health.ready
            again = await second.next_request()
            assert (again.request_id, again.seed, again.prompt) == (
                first_try.request_id,
                first_try.seed,
                first_try.prompt,
            )
            assert (await second.next_request()).request_id == "new"
            for request in (queued, new):
                second.emit(request.request_id, 4, reason="stop")
                assert (await request.wait()).outputs[0].token_ids == [4]
            assert stage.supervisor.ready[0].load == 0

    run(play())


def test_a_request_that_is_aborted_between_two_engines_is_not_started_again() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            first = await stage.ready_engine()
            gone, stays = stage.submit("gone"), stage.submit("stays")
            first.die()
            await until(lambda: stage.supervisor.health.phase == "restarting")
            second = await stage.launched()
            gone.abort()
            second.become_ready()
            assert (await second.next_request()).request_id == "stays"
            assert second.requests.empty() and gone.output.outputs[0].finish_reason == "abort"
            stays.abort()
            assert await second.requests.get() == Abort("stays")

    run(play())


def test_a_request_that_ends_every_engine_is_given_up() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            engine = await stage.ready_engine()
            poison = stage.submit("poison")
            for _ in range(MOST_TRIES - 1):
                await engine.next_request()
                engine.die()
                engine = await stage.ready_engine()
            await engine.next_request()
            engine.die()
            with pytest.raises(EngineDied, match=f"{MOST_TRIES} engines have ended while they had this request"):
                await poison.wait()
            await stage.ready_engine()

    run(play())


def test_an_embedding_is_tried_again_where_another_engine_comes() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            first = await stage.ready_engine(generates=False)
            wanted = asyncio.ensure_future(stage.supervisor.embed("e", [5, 6]))
            assert isinstance(await first.requests.get(), Embed)
            first.die()
            second = await stage.ready_engine(generates=False)
            assert isinstance(await second.requests.get(), Embed)
            second.say(Embedded("e", b"vector"))
            assert await wanted == b"vector"

    run(play())


def test_an_embedding_that_ends_every_engine_is_given_up() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            wanted = None
            for _ in range(MOST_TRIES):
                engine = await stage.ready_engine(generates=False)
                wanted = wanted or asyncio.ensure_future(stage.supervisor.embed("e", [5, 6]))
                assert isinstance(await asyncio.wait_for(engine.requests.get(), PATIENCE), Embed)
                engine.die()
            assert wanted is not None
            with pytest.raises(EngineDied):
                await asyncio.wait_for(wanted, PATIENCE)

    run(play())


def test_prompts_that_begin_alike_go_to_the_same_engine() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            for _ in range(2):
                await stage.ready_engine()
            begin = range(5, 5 + 2 * info().limits["page_size"])
            stage.submit("first", *begin)
            stage.submit("second", *begin, 99)
            assert sorted(len(each.generations) for each in stage.supervisor.ready) == [0, 2]

    run(play())


def test_what_an_engine_had_cached_is_forgotten_with_it() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            for _ in range(2):
                await stage.ready_engine()
            begin = range(5, 5 + 2 * info().limits["page_size"])
            stage.submit("elsewhere").abort()
            stage.submit("cached", *begin).abort()
            stage.engines[1].die()
            await stage.ready_engine()
            stage.submit("anywhere").abort()
            taken = stage.submit("again", *begin)
            assert taken in stage.supervisor.replicas[0].generations.values()

    run(play())


@pytest.mark.parametrize(
    ("model", "wanted"),
    [(None, None), ("owner/name", "owner/name"), ("~/m", str(Path.home() / "m")), ("m", str(Path.cwd() / "m"))],
)
def test_an_engine_is_told_a_model_that_means_the_same_in_any_folder(model: str | None, wanted: str | None) -> None:
    assert with_whole_path(EngineConfig(model=model)).model == wanted


def test_an_embedding_whose_client_leaves_is_ended_and_is_no_load() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine(generates=False)
            (replica,) = stage.supervisor.ready
            wanted = asyncio.ensure_future(stage.supervisor.embed("e", [5, 6]))
            assert isinstance(await engine.requests.get(), Embed) and replica.load == 1
            wanted.cancel()
            assert await asyncio.wait_for(engine.requests.get(), PATIENCE) == Abort("e") and replica.load == 0

    run(play())


def test_an_output_that_can_not_be_taken_in_ends_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(output: EngineOutput) -> None:
        raise KeyError("planted")

    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine()
            broken, other = stage.submit("broken"), stage.submit("other")
            broken.deliver = breaks
            for name in ("broken", "other"):
                await engine.next_request()
                engine.emit(name, 9, reason="length")
            with pytest.raises(Unanswered, match="planted"):
                await broken.wait()
            assert (await other.wait()).outputs[0].token_ids == [9]
            assert await asyncio.wait_for(engine.requests.get(), PATIENCE) == Abort("broken")

    run(play())


def test_an_engine_is_as_old_as_its_last_word() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine()
            (replica,) = stage.supervisor.ready
            before = time.monotonic() - replica.report_age
            engine.say(EngineStats(running=1))
            await until(lambda: replica.stats.running == 1)
            assert time.monotonic() - replica.report_age > before

    run(play())


def test_the_device_of_this_machine_is_no_word_to_engines_on_others() -> None:
    async def play() -> None:
        for is_remote in (False, True):
            here = ChosenDevice("x", "", "1", 1, "").encode()
            async with staged(is_remote=is_remote, chosen=[here]) as stage:
                assert (await stage.launched()).spec.chosen == ("" if is_remote else here)

    run(play())


def test_what_waited_for_an_engine_is_given_to_the_first_alone() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            for _ in range(2):
                await stage.ready_engine()
            stage.submit("waits")
            for engine in stage.engines[:2]:
                engine.die()
            await until(lambda: not stage.supervisor.ready)
            third = await stage.ready_engine()
            assert (await third.next_request()).request_id == "waits"
            fourth = await stage.ready_engine()
            stage.submit("next")
            assert (await fourth.next_request()).request_id == "next"

    run(play())


def test_an_embedding_fails_where_no_engine_comes() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine(generates=False)
            wanted = asyncio.ensure_future(stage.supervisor.embed("e", [5, 6]))
            await engine.requests.get()
            engine.die()
            with pytest.raises(EngineDied):
                await wanted

    run(play())


def test_a_replica_that_was_ready_and_can_not_start_again_leaves_the_others_serving() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            first, second = await stage.ready_engine(), await stage.ready_engine()
            first.die()
            (await stage.launched()).die(2, failed=Failed("its device is gone", 2))
            await until(lambda: len(stage.supervisor.replicas) == 1)
            assert stage.supervisor.health.ready and not stage.supervisor.stopped.is_set()
            stage.submit("next")
            assert (await second.next_request()).request_id == "next"
            second.die()
            (await stage.launched()).die(2, failed=Failed("its device is gone too", 2))
            await asyncio.wait_for(stage.supervisor.stopped.wait(), PATIENCE)
            assert stage.supervisor.health.reason == "its device is gone too"

    run(play())


def test_stopping_fails_what_is_on_its_way_and_ends_engines_that_still_start() -> None:
    async def play() -> None:
        async with staged(replicas=2, restart=True) as stage:
            await stage.ready_engine()
            second = await stage.ready_engine()
            on_its_way = [stage.submit(f"r{index}") for index in range(4)]
            second.die()
            await stage.launched()
            await stage.supervisor.stop()
            for generation in on_its_way:
                with pytest.raises(ShuttingDown):
                    await generation.wait()
            assert len(stage.engines) == 3 and all(engine.has_ended for engine in stage.engines)

    run(play())


def test_the_counters_of_engines_that_died_are_kept() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            for count in (5, 7):
                engine = await stage.ready_engine()
                known = {"paths": {"eager": count}, "drafts": {(4, 0, 3, 1): count}, "swap_hits": count}
                engine.say(EngineStats(generation_tokens=count, running=1, **known))
                await until(lambda: stage.supervisor.stats().running == 1)
                engine.die()
                await until(lambda: stage.supervisor.stats().running == 0)
            total = stage.supervisor.stats()
            assert (total.generation_tokens, total.paths, total.drafts) == (12, {"eager": 12}, {(4, 0, 3, 1): 12})
            assert total.swap_hits == 12
            assert stage.supervisor.deaths == 2

    run(play())


def test_an_engine_hears_that_its_connection_broke_and_not_that_it_closed_it() -> None:
    async def play() -> None:
        context, lost = zmq.asyncio.Context(), [threading.Event(), threading.Event()]
        frontends = [FrontendChannel(context, "tcp://127.0.0.1:0") for _ in lost]
        engines = [
            EngineChannel(Address(frontend.endpoint), event.set)
            for frontend, event in zip(frontends, lost, strict=True)
        ]
        for frontend, engine in zip(frontends, engines, strict=True):
            engine.send(Phase("connected", 0, 0))
            await asyncio.wait_for(frontend.receive(), PATIENCE)
        engines[1].close()
        frontends[0].close()
        assert await asyncio.to_thread(lost[0].wait, 20)
        assert not lost[1].is_set()
        frontends[1].close()
        engines[0].close()
        context.destroy(linger=0)

    run(play())


def test_an_engine_that_lost_its_connection_says_so() -> None:
    async def play() -> None:
        async with staged() as stage:
            (await stage.ready_engine()).die(LINK_BROKE)
            await asyncio.wait_for(stage.supervisor.stopped.wait(), PATIENCE)
            assert stage.supervisor.health.reason.endswith("lost its connection to this server")

    run(play())


def test_nobody_without_the_keys_is_heard_on_a_network() -> None:
    async def play() -> None:
        async with staged(is_remote=True) as stage:
            endpoint = stage.engines[0].spec.address.endpoint
            context = zmq.asyncio.Context()
            stranger = context.socket(zmq.PAIR)
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | FAILED_HANDSHAKE)
            stranger.connect(endpoint)
            event = await asyncio.wait_for(recv_monitor_message(monitor), PATIENCE)
            assert event["event"] & FAILED_HANDSHAKE
            stranger.disable_monitor()
            context.destroy(linger=0)

    run(play())


def test_replicas_that_differ_are_named(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            await stage.ready_engine(fingerprint="fp_1")
            await stage.ready_engine(fingerprint="fp_2")

    run(play())
    assert "fp_1" in caplog.text and "fp_2" in caplog.text


def test_a_request_knows_which_replica_answers_it_also_after_another_began_it() -> None:
    async def play() -> None:
        async with staged(replicas=2) as stage:
            dying = await stage.ready_engine(fingerprint="fp_1")
            await stage.ready_engine(fingerprint="fp_2")
            requests = [stage.submit(f"r{index}", index) for index in range(4)]
            assert sorted(request.fingerprint for request in requests) == ["fp_1", "fp_1", "fp_2", "fp_2"]
            dying.die()
            await until(lambda: all(request.fingerprint == "fp_2" for request in requests))

    run(play())


def test_each_replica_gets_its_own_variables() -> None:
    async def play() -> None:
        async with staged(replicas=2, replica_env=("VISIBLE={index}", "MODE=a=b")) as stage:
            found = {engine.spec.replica: engine.variables for engine in stage.engines}
            assert found == {0: {"VISIBLE": "0", "MODE": "a=b"}, 1: {"VISIBLE": "1", "MODE": "a=b"}}

    run(play())


@pytest.mark.parametrize("text", ["VISIBLE", "=1", "A B=1", "SGLCORE_THREADS=1"])
def test_a_variable_that_an_engine_would_not_get_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="replica_env"):
        ServerConfig(replica_env=(text,))


@pytest.mark.parametrize("text", ["CPU", "=1", "CPU=many", "CPU=-1", "CPU=nan", "CPU=inf"])
def test_an_amount_of_a_cluster_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ray_resources"):
        ServerConfig(ray_resources=(text,))


def test_resources_of_a_cluster_need_the_cluster() -> None:
    assert ServerConfig(ray="auto", ray_resources=("GPU=1",)).resources == {"GPU": 1.0}
    with pytest.raises(ConfigError, match="found ray_resources without ray"):
        ServerConfig(ray_resources=("GPU=1",))


@pytest.mark.parametrize(
    ("address", "message"), [("auto", "pip install ray"), ("ray://head:10001", "does not include this machine")]
)
def test_a_cluster_that_can_not_be_reached_is_refused_at_once(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=message):
        launcher_for(ServerConfig(ray=address))


def test_starts_wait_longer_and_longer_and_a_long_life_forgives_all() -> None:
    policy = RestartPolicy()
    waits = []
    for _ in range(8):
        policy.end(1.0, 1)
        waits.append(policy.wait)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_WAIT, LONGEST_WAIT] and policy.may_go_on
    policy.end(SHORT_LIFE, 1)
    assert policy.wait == 0.0
    policy.end(None, 1)
    assert (policy.wait, policy.may_go_on) == (1.0, True)
    policy.end(None, 2)
    assert not policy.may_go_on


def test_whatever_keeps_a_replica_from_starting_again_those_who_wait_for_it_hear_of_it() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            engine = await stage.ready_engine()
            waiting = stage.submit("queued")
            await engine.next_request()
            stage.refusal = RuntimeError("no place left")
            engine.die()
            with pytest.raises(EngineDied, match="no place left"):
                await waiting.wait()
            assert stage.supervisor.stopped.is_set() and stage.supervisor.exit_code == 1

    run(play())


def test_an_answer_of_which_a_report_can_not_be_read_is_never_given_as_whole() -> None:
    async def play() -> None:
        async with staged() as stage:
            engine = await stage.ready_engine()
            generation = stage.submit("cut")
            await engine.next_request()
            engine.emit("cut", 9)
            await generation.__anext__()
            engine.say_bytes(b"\x92\x03no outputs")
            engine.emit("cut", 10, reason="length")
            with pytest.raises(EngineDied, match="could not be handled"):
                await generation.wait()
            assert engine.has_ended and not stage.supervisor.health.live

    run(play())


def test_giving_up_tells_those_who_run_and_those_who_wait_for_a_replica() -> None:
    async def play() -> None:
        async with staged(restart=True) as stage:
            engine = await stage.ready_engine()
            waiting = stage.submit("waits")
            await engine.next_request()
            engine.die()
            again = await stage.launched()
            embedding = asyncio.ensure_future(stage.supervisor.embed("e", [5]))
            await asyncio.sleep(0)
            assert not waiting.is_closed and not again.has_ended and not embedding.done()
            stage.supervisor.give_up(ShuttingDown("played"))
            with pytest.raises(ShuttingDown, match="played"):
                await waiting.wait()
            with pytest.raises(NotReady):
                await asyncio.wait_for(embedding, PATIENCE)

    run(play())
