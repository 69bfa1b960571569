"""Requests between two engines, and several prompts of one request: they are known, ended and
joined like those that run."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglcore.engine.outputs import Completion, RequestOutput, TextDelta
from sglcore.serving.replicas.channel import FrontendChannel, open_channel
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.ipc import Abort, Address
from sglcore.serving.replicas.runs import Runs, check_answered, failure_of
from sglcore.serving.replicas.server_errors import (
    ENDS,
    RESTARTS,
    EngineDied,
    InvalidRequest,
    NotReady,
    Overloaded,
    Unanswered,
)
from tests.serving.chat.test_chat_run import Looks
from tests.serving.replicas.test_frontend import PARAMS, PLACES, begin, staged_frontend
from tests.serving.staged_replicas import PATIENCE, PlayedEngine, Stage, staged, until


async def between(frontend: Frontend, stage: Stage, engine: PlayedEngine) -> PlayedEngine:
    """End the engine; return the one that starts in its place."""
    engine.die()
    await until(lambda: frontend.health.phase == "restarting")
    return await stage.launched()


def test_a_request_between_two_engines_has_its_id_and_counts_as_open() -> None:
    async def play() -> None:
        async with staged_frontend(restart=True) as (frontend, stage):
            engine = await stage.ready_engine()
            first = await frontend.generate([5, 6, 7], PARAMS, request_id="mine")
            await engine.next_request()
            second = await between(frontend, stage, engine)
            assert frontend.supervisor.has("mine") and frontend.supervisor.generations == [first]
            with pytest.raises(InvalidRequest, match="mine"):
                await frontend.generate([5, 6, 7], PARAMS, request_id="mine")
            new = await begin(frontend)
            assert set(frontend.supervisor.generations) == {first, new} and frontend.abort([new.request_id]) == 1
            assert new.output.outputs[0].finish_reason == "abort" and frontend.supervisor.generations == [first]
            second.become_ready()
            assert (await second.next_request()).request_id == "mine" and second.requests.empty()
            assert frontend.abort(None) == 1 and not frontend.supervisor.has("mine")

    asyncio.run(play())


def test_a_drain_waits_for_what_is_between_two_engines() -> None:
    async def play() -> None:
        async with staged_frontend(restart=True) as (frontend, stage):
            engine = await stage.ready_engine()
            waiting = await begin(frontend)
            await engine.next_request()
            second = await between(frontend, stage, engine)
            draining = asyncio.create_task(frontend.drain())
            await asyncio.sleep(0.05)
            assert not draining.done() and not waiting.is_closed
            second.become_ready()
            second.emit((await second.next_request()).request_id, 9, reason="length")
            assert (await waiting.wait()).outputs[0].token_ids == [9]
            await asyncio.wait_for(draining, PATIENCE)

    asyncio.run(play())


def test_only_replicas_that_are_ready_have_places() -> None:
    async def play() -> None:
        async with staged_frontend(replicas=2, max_queued_requests=0) as (frontend, stage):
            engines = [await stage.ready_engine() for _ in range(2)]
            engines[0].die()
            await stage.launched()
            begun = [await begin(frontend) for _ in range(PLACES)]
            with pytest.raises(Overloaded, match=f"at most {PLACES} can run"):
                await begin(frontend)
            for each in begun:
                each.abort()

    asyncio.run(play())


@pytest.mark.parametrize(("address", "wanted"), [("host:5000", [5000, 5001, 5002]), ("host:0", [0, 0, 0])])
def test_each_replica_that_gives_pages_listens_at_a_port_of_its_own(address: str, wanted: list[int]) -> None:
    async def play() -> None:
        settings: dict[str, Any] = {"role": "prompt", "pages_address": address, "pages_secret": "s" * 32}
        async with staged(replicas=3, **settings) as stage:
            found = {engine.spec.replica: engine.spec.pages.address for engine in stage.engines}
            assert found == {number: f"host:{port}" for number, port in enumerate(wanted)}

    asyncio.run(play())


def test_operators_orders_are_refused_while_no_engine_is_ready() -> None:
    async def play() -> None:
        async with staged_frontend(restart=True) as (frontend, stage):
            orders = (lambda: frontend.pause("keep"), frontend.flush_prefix_cache, frontend.audit)
            for order in orders:
                with pytest.raises(NotReady, match="starting"):
                    await asyncio.wait_for(order(), PATIENCE)
            assert not frontend.is_paused
            await between(frontend, stage, await stage.ready_engine())
            for order in orders:
                with pytest.raises(NotReady, match="restarting"):
                    await asyncio.wait_for(order(), PATIENCE)
            assert not frontend.is_paused
            await frontend.resume()

    asyncio.run(play())


def test_the_channel_of_an_engine_that_has_died_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[FrontendChannel] = []

    def kept(*given: Any) -> tuple[FrontendChannel, Address]:
        channel, address = open_channel(*given)
        opened.append(channel)
        return channel, address

    monkeypatch.setattr("sglcore.serving.replicas.supervisor.open_channel", kept)

    async def play() -> None:
        async with staged(restart=True) as stage:
            for count in (1, 2):
                (await stage.ready_engine()).die()
                await until(lambda count=count: len(opened) == count + 1)
            assert [(each._socket.closed, each._beats.closed) for each in opened] == [(True, True)] * 2 + [
                (False, False)
            ]

    asyncio.run(play())


def test_an_embedding_that_no_engine_can_take_up_again_is_told_what_will_become_of_the_server() -> None:
    async def play(*, restarts: bool) -> str:
        async with staged(restart=restarts) as stage:
            engine = await stage.ready_engine(generates=False)
            wanted = asyncio.ensure_future(stage.supervisor.embed("e", [5, 6]))
            await engine.requests.get()
            engine.die()
            if restarts:
                await stage.launched()
                stage.supervisor.give_up(RuntimeError("planted"))
            with pytest.raises(EngineDied) as refused:
                await asyncio.wait_for(wanted, PATIENCE)
            return str(refused.value)

    assert ENDS in asyncio.run(play(restarts=False)) and RESTARTS in asyncio.run(play(restarts=True))


def test_the_load_counts_embeddings_and_what_is_ended_by_its_client_is_ended_in_its_engine() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            (replica,) = frontend.supervisor.replicas.values()
            async with await begin(frontend, 2) as generation:
                await engine.next_request()
                assert replica.load == 2
            assert await asyncio.wait_for(engine.requests.get(), PATIENCE) == Abort(generation.request_id)
            generation.abort()
            assert replica.load == 0 and engine.requests.empty() and frontend._open == 0

    asyncio.run(play())


@pytest.mark.parametrize(
    ("model", "path", "wanted"),
    [(None, "x", "sglcore-demo"), ("owner/name", "x", "owner/name"), ("given", "folder/link", "real")],
)
def test_a_model_without_a_name_is_called_by_its_repository_or_its_folder(
    model: str | None, path: str, wanted: str, tmp_path: Any
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "real")
    frontend = SimpleNamespace(engine_config=SimpleNamespace(model=model), model_path=tmp_path / path)
    assert Frontend._own_name(cast(Any, frontend)) == wanted


class Played:
    """A generation that ends when the test says so, and then gives these deltas."""

    def __init__(self, *deltas: TextDelta) -> None:
        self.over, self._deltas = asyncio.Event(), deltas
        self.fingerprint, self.closed = "", False
        self.output = RequestOutput("r", None, [1], [Completion(0, 7)])

    async def ended(self) -> None:
        await self.over.wait()

    async def __aiter__(self) -> Any:
        try:
            for delta in self._deltas:
                yield delta
            await self.over.wait()
        finally:
            self.closed = True


def test_a_request_has_ended_when_the_last_of_its_prompts_has() -> None:
    async def play() -> None:
        played = [Played() for _ in range(3)]
        runs = Runs(cast(Any, played), AsyncExitStack())
        ending = asyncio.ensure_future(runs.ended())
        for each in (played[0], played[2], played[1]):
            await asyncio.sleep(0)
            assert not ending.done()
            each.over.set()
        await asyncio.wait_for(ending, PATIENCE)

    asyncio.run(play())


def test_the_parts_of_several_prompts_bear_their_places_and_no_reader_is_left() -> None:
    async def play() -> None:
        played = [Played(*(TextDelta("r", 0, f"{place}{number}", ()) for number in range(2))) for place in range(3)]
        items = Runs(cast(Any, played), AsyncExitStack()).read()
        found = [await anext(items) for _ in range(6)]
        assert sorted((place, item.text) for place, item in found if isinstance(item, TextDelta)) == [
            (place, f"{place}{number}") for place in range(3) for number in range(2)
        ]
        await items.aclose()
        await until(lambda: all(each.closed for each in played))

    asyncio.run(play())


def outputs(*reasons: tuple[str, ...]) -> list[RequestOutput]:
    def sample(reason: str) -> Completion:
        made = Completion(0, 7, error=f"by {reason}" if reason in ("error", "abort", "refused") else "")
        made.finish_reason, made.refused = cast(Any, "error" if reason == "refused" else reason), reason == "refused"
        return made

    return [RequestOutput("r", None, [1], [sample(reason) for reason in each]) for each in reasons]


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ([("stop",)], None),
        ([("error",)], "by error"),
        ([("abort",)], "by abort"),
        ([("refused",)], "by refused"),
        ([("error", "stop")], None),
        ([("stop", "error")], None),
        ([("error", "abort"), ("abort", "error")], "by error"),
        ([("abort", "error")], "by abort"),
        ([("error",), ("length",)], None),
        ([("length",), ("error",)], None),
        ([], None),
    ],
)
def test_a_request_is_an_error_if_every_sample_failed_and_then_that_of_the_first(
    reasons: list[tuple[str, ...]], said: str | None
) -> None:
    if said is None:
        return check_answered(outputs(*reasons))
    with pytest.raises(Unanswered, match=said):
        check_answered(outputs(*reasons))


@pytest.mark.parametrize(
    ("reason", "status"), [("stop", None), ("length", None), ("error", 500), ("abort", 503), ("refused", 400)]
)
def test_a_sample_that_failed_has_the_status_of_whose_fault_it_was(reason: str, status: int | None) -> None:
    (output,) = outputs((reason,))
    found = failure_of(output.outputs[0])
    assert (None if found is None else found.status) == status


class Spoken(Played):
    """A generation of two samples that have ended."""

    def __init__(self, place: int) -> None:
        super().__init__(*(TextDelta("r", index, f"{place}{index}", (), "stop") for index in (1, 0)))
        self.output.outputs = [Completion(index, 7, f"{place}{index}") for index in range(2)]
        self.over.set()

    async def wait(self) -> RequestOutput:
        return self.output


@pytest.mark.parametrize("prompts", [1, 3])
def test_each_sample_of_each_prompt_is_checked_before_its_end_is_told(prompts: int) -> None:
    async def play() -> None:
        looks = Looks()
        runs = Runs(cast(Any, [Spoken(place) for place in range(prompts)]), AsyncExitStack(), "form", cast(Any, looks))
        found = 0
        async for _, item in runs.read():
            assert isinstance(item, TextDelta) and looks.seen[found] == ("form", item.text)
            found += 1
        assert found == len(looks.seen) == 2 * prompts
        looks.seen.clear()
        assert await runs.wait() == runs.outputs
        assert looks.seen == [("form", f"{place}{index}") for place in range(prompts) for index in range(2)]

    asyncio.run(play())


def test_a_slow_reader_of_several_prompts_holds_up_their_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglcore.serving.replicas.runs.AT_ONCE", 4)
    taken: list[int] = []

    class Counted(Played):
        async def __aiter__(self) -> Any:
            for number in range(50):
                taken.append(number)
                yield TextDelta("r", 0, str(number), ())

    async def play() -> None:
        items = Runs(cast(Any, [Counted(), Counted()]), AsyncExitStack()).read()
        await anext(items)
        for _ in range(50):
            await asyncio.sleep(0)
        assert 4 <= len(taken) <= 8
        assert len([each async for each in items]) == 99

    asyncio.run(asyncio.wait_for(play(), PATIENCE))


@pytest.mark.parametrize("form", ["", "response_format"])
@pytest.mark.parametrize("prompts", [1, 2])
def test_a_form_that_an_engine_refuses_is_at_fault_and_without_one_no_field_is(form: str, prompts: int) -> None:
    class Refusing(Played):
        async def __aiter__(self) -> Any:
            raise InvalidRequest("it can not be compiled")
            yield

        async def wait(self) -> Any:
            raise InvalidRequest("it can not be compiled")

    async def play() -> None:
        runs = Runs(cast(Any, [Refusing() for _ in range(prompts)]), AsyncExitStack(), form)
        for reading in (anext(runs.read()), runs.wait()):
            with pytest.raises(InvalidRequest, match="can not be compiled") as refused:
                await reading
            assert refused.value.param == (form or None)

    asyncio.run(play())
