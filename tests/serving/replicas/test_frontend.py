"""The frontend over played engines: which requests it admits, and what happens to them when the
server stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.engine.structured_output.answer_check import AnswerChecks
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_errors import ContextError
from sglcore.serving.replicas.engine_frontend import Frontend, names_of
from sglcore.serving.replicas.ipc import Done, Embed, Embedded, Pause
from sglcore.serving.replicas.prompt_generation import Generation
from sglcore.serving.replicas.runs import start_runs
from sglcore.serving.replicas.server_errors import InvalidRequest, Overloaded, ShuttingDown
from tests.serving.staged_replicas import Stage, info, until

PARAMS = SamplingParams(max_tokens=4)
PLACES = info().limits["max_requests"]


@asynccontextmanager
async def staged_frontend(**settings: object) -> AsyncIterator[tuple[Frontend, Stage]]:
    """A frontend with an engine played by the test; it is stopped at the end."""
    stage = Stage(is_remote=False)
    frontend = Frontend(EngineConfig(), ServerConfig(**settings), launcher=stage)  # pyright: ignore[reportArgumentType]
    stage.supervisor = frontend.supervisor
    await frontend.start()
    try:
        yield frontend, stage
    finally:
        await frontend.stop()


async def begin(frontend: Frontend, samples: int = 1) -> Generation:
    return await frontend.generate([5, 6, 7], replace(PARAMS, n=samples))


def test_so_many_may_wait_and_the_next_is_told_when_to_come_again_until_one_has_ended() -> None:
    async def play() -> None:
        async with staged_frontend(max_queued_requests=2) as (frontend, stage):
            engine = await stage.ready_engine()
            generations = [await begin(frontend) for _ in range(PLACES + 2)]
            with pytest.raises(Overloaded, match="at most 2") as refused:
                await begin(frontend)
            assert refused.value.retry_after >= 1
            engine.emit(generations[0].request_id, 9, reason="length")
            await generations[0].wait()
            generations.append(await begin(frontend))
            with pytest.raises(Overloaded):
                await begin(frontend)
            for generation in generations:
                generation.abort()
            assert (await begin(frontend)).request_id in frontend.supervisor.replicas[0].generations

    asyncio.run(play())


def test_the_load_of_a_replica_is_each_sample_of_each_prompt_until_the_prompt_has_ended() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            (replica,) = frontend.supervisor.replicas.values()
            several = await begin(frontend, 3)
            one = await begin(frontend)
            assert replica.load == 4
            several.abort()
            assert replica.load == 1
            engine.emit(one.request_id, 9, reason="length")
            await one.wait()
            assert replica.load == 0

    asyncio.run(play())


def test_prompts_that_are_read_at_once_beside_the_loop_are_no_more_than_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglcore.serving.replicas.engine_frontend.LONG_TEXT", 4)

    async def play() -> None:
        async with staged_frontend(max_queued_requests=2) as (frontend, stage):
            await stage.ready_engine()
            many = [frontend.generate("once upon a time", PARAMS) for _ in range(PLACES + 5)]
            found = await asyncio.gather(*many, return_exceptions=True)
            begun = [each for each in found if isinstance(each, Generation)]
            assert len(begun) == PLACES + 2 and sum(isinstance(each, Overloaded) for each in found) == 3
            for generation in begun:
                generation.abort()
            with pytest.raises(ContextError):
                await frontend.generate("word " * 20_000, PARAMS)
            found = [await begin(frontend) for _ in range(PLACES + 2)]  # no old request counts
            with pytest.raises(Overloaded):
                await begin(frontend)

    asyncio.run(play())


def test_a_drain_waits_for_a_prompt_that_is_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcore.serving.replicas.engine_frontend.LONG_TEXT", 4)

    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            reading = asyncio.create_task(frontend.generate("once upon a time", PARAMS))
            await asyncio.sleep(0)
            draining = asyncio.create_task(frontend.drain())
            generation = await reading
            engine.emit(generation.request_id, 9, reason="length")
            assert (await generation.wait()).outputs[0].token_ids == [9]
            await asyncio.wait_for(draining, 120)

    asyncio.run(play())


def test_a_prompt_has_as_many_tokens_as_the_server_allows_and_no_more() -> None:
    async def play() -> None:
        async with staged_frontend(max_prompt_tokens=3) as (frontend, stage):
            await stage.ready_engine()
            (await begin(frontend)).abort()
            with pytest.raises(ContextError, match="4 tokens.*at most 3"):
                await frontend.generate([5, 6, 7, 8], PARAMS)

    asyncio.run(play())


def test_a_drain_takes_nothing_more_and_ends_with_the_last_request() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            first, second = await begin(frontend), await begin(frontend)
            told: list[str] = []
            frontend.when_draining(lambda: told.append(frontend.health.phase))
            draining = asyncio.create_task(frontend.drain())
            await until(lambda: told == ["draining"])
            with pytest.raises(ShuttingDown, match="told to stop"):
                await begin(frontend)
            engine.emit(first.request_id, 9, reason="length")
            await first.wait()
            assert not draining.done()
            second.abort()
            await asyncio.wait_for(draining, 120)

    asyncio.run(play())


def test_what_is_overdue_is_told_so_and_keeps_what_had_come() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            begun, queued, ended = [await begin(frontend) for _ in range(3)]
            engine.emit(begun.request_id, 9)
            engine.emit(ended.request_id, 9, reason="length")
            await until(lambda: bool(begun.output.outputs[0].token_ids) and ended.is_closed)
            frontend.give_up()
            assert (await ended.wait()).outputs[0].finish_reason == "length"
            for generation in (begun, queued):
                with pytest.raises(ShuttingDown, match=r"did not end in 30 s \(drain_timeout\)"):
                    await generation.wait()
            assert begun.output.outputs[0].token_ids == [9]

    asyncio.run(play())


def test_an_id_names_one_request_at_a_time() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            first = await frontend.generate([5, 6, 7], replace(PARAMS, seed=0), request_id="mine")
            assert (await engine.next_request()).seed == first.output.outputs[0].seed == 0
            with pytest.raises(InvalidRequest, match="mine"):
                await frontend.generate([5, 6, 7], PARAMS, request_id="mine")
            engine.emit("mine", 9, reason="length")
            assert (await first.wait()).outputs[0].token_ids == [9]
            (await frontend.generate([5, 6, 7], PARAMS, request_id="mine")).abort()

    asyncio.run(play())


def test_each_sample_of_a_request_counts_as_one_that_waits() -> None:
    async def play() -> None:
        async with staged_frontend(max_queued_requests=2) as (frontend, stage):
            await stage.ready_engine()
            with pytest.raises(Overloaded, match=f"at most {PLACES} can run"):
                await frontend.generate([5, 6, 7], SamplingParams(n=PLACES + 3))
            fits = await frontend.generate([5, 6, 7], SamplingParams(n=PLACES + 2))
            with pytest.raises(Overloaded):
                await begin(frontend)
            assert frontend.supervisor.replicas[0].load == PLACES + 2
            fits.abort()
            assert frontend.supervisor.replicas[0].load == 0
            (await begin(frontend)).abort()

    asyncio.run(play())


def test_texts_to_embed_wait_like_samples_and_are_counted_until_they_have_ended() -> None:
    async def play() -> None:
        async with staged_frontend(max_queued_requests=0) as (frontend, stage):
            engine = await stage.ready_engine(generates=False)
            with pytest.raises(Overloaded):
                await frontend.pooled([([5, 6], None)] * (PLACES + 1))
            for _ in range(2):
                asking = asyncio.ensure_future(frontend.pooled([([5, 6], None)] * PLACES))
                for _ in range(PLACES):
                    order = await asyncio.wait_for(engine.requests.get(), 60)
                    assert isinstance(order, Embed)
                    engine.say(Embedded(order.request_id, b"\0\0\0\0"))
                assert [each.tokens for each in await asking] == [2] * PLACES

    asyncio.run(play())


def test_every_replica_has_places_and_those_that_wait_for_the_end_of_a_pause_want_one() -> None:
    async def play() -> None:
        async with staged_frontend(replicas=2, max_queued_requests=0) as (frontend, stage):
            engines = [await stage.ready_engine() for _ in range(2)]
            pausing = asyncio.ensure_future(frontend.pause("keep"))
            for engine in engines:
                order = await asyncio.wait_for(engine.requests.get(), 60)
                assert isinstance(order, Pause) and order.is_paused
                engine.say(Done(order.request_id))
            await pausing
            waiting = [asyncio.ensure_future(begin(frontend)) for _ in range(2 * PLACES)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await asyncio.wait_for(begin(frontend), 60)
            draining = asyncio.ensure_future(frontend.drain())
            for generation in await asyncio.wait_for(asyncio.gather(*waiting), 60):
                generation.abort()
            for engine in engines:
                orders = [await asyncio.wait_for(engine.requests.get(), 60) for _ in range(2 * PLACES + 1)]
                (order,) = [each for each in orders if isinstance(each, Pause)]
                assert not order.is_paused
                engine.say(Done(order.request_id))
            await asyncio.wait_for(draining, 60)

    asyncio.run(play())


@pytest.mark.parametrize("is_shown", [False, True])
def test_metrics_tell_of_engines_that_died_and_have_the_names_of_vllm_where_that_is_asked_for(is_shown: bool) -> None:
    async def play() -> None:
        async with staged_frontend(restart=True, vllm_metrics=is_shown) as (frontend, stage):
            (await stage.ready_engine()).die()
            await stage.ready_engine()
            page = frontend.metrics.page().decode()
            assert "sglcore_engine_deaths_total 1.0" in page and ("vllm:num_requests_running{" in page) is is_shown

    asyncio.run(play())


def test_all_samples_of_a_request_that_has_ended_make_room_for_others() -> None:
    async def play() -> None:
        async with staged_frontend(max_queued_requests=2) as (frontend, stage):
            await stage.ready_engine()
            for _ in range(2):
                several = await begin(frontend, PLACES + 2)
                with pytest.raises(Overloaded):
                    await begin(frontend)
                several.abort()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("name", "answer", "caller", "names"),
    [
        ("chatcmpl-a1", "", "", {"chatcmpl-a1"}),
        ("cmpl-a1-0", "cmpl-a1", "", {"cmpl-a1-0", "cmpl-a1"}),
        ("cmpl-a1-12", "cmpl-a1", "mine", {"cmpl-a1-12", "cmpl-a1", "mine"}),
        ("7", "", "mine", {"7", "mine"}),
        ("job-7", "", "", {"job-7"}),
    ],
)
def test_a_prompt_is_known_by_its_own_id_by_that_of_its_answer_and_by_that_of_its_caller(
    name: str, answer: str, caller: str, names: set[str]
) -> None:
    generation: Any = SimpleNamespace(request_id=name, caller=caller, answer_id=answer)
    assert names_of(generation) == names


def test_an_abort_ends_the_prompts_of_an_answer_and_no_request_with_a_longer_id() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            await stage.ready_engine()
            async with await start_runs(frontend, [[5], [6]], PARAMS, name="job"):
                own = await frontend.generate([7], PARAMS, request_id="job-7")
                assert frontend.abort(["job"]) == 2
                assert [each.request_id for each in frontend.supervisor.generations] == ["job-7"]
                own.abort()

    asyncio.run(play())


def test_a_frontend_that_stops_ends_the_process_that_checks_answers() -> None:
    class Checks(AnswerChecks):
        closed = 0

        def close(self) -> None:
            self.closed += 1
            super().close()

    async def play() -> None:
        stage = Stage(is_remote=False)
        frontend = Frontend(EngineConfig(), ServerConfig(), launcher=stage, answer_checks=checks)
        stage.supervisor = frontend.supervisor
        await frontend.start()
        assert frontend.answer_checks is checks and not checks.closed
        await frontend.stop()

    checks = Checks()
    asyncio.run(play())
    assert checks.closed == 1


def test_the_longest_prompt_is_that_of_the_model_unless_the_server_allows_less() -> None:
    async def play() -> None:
        longest = list[tuple[int, int]]()
        for most in (None, 10**6, 9):
            async with staged_frontend(max_prompt_tokens=most) as (frontend, _):
                longest.append((frontend.longest_prompt(info()), frontend.longest_prompt(info(), embeds=True)))
        assert longest[0] == longest[1] and min(longest[0]) > 9 and longest[2] == (9, 9)

    asyncio.run(play())
