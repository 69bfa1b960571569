"""Operator actions on requests of others: abort, pause, and flush of the prefix cache."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.server.control import PATHS
from sglcore.serving.http.http_app import make_app
from sglcore.serving.replicas.engine_frontend import Frontend
from sglcore.serving.replicas.ipc import Abort, Done, Flush, GenerateRequest, Pause
from sglcore.serving.replicas.metrics.server_metrics import CALLER
from sglcore.serving.replicas.prompt_generation import Generation
from tests.serving.replicas.test_frontend import begin, staged_frontend
from tests.serving.servers import Server
from tests.serving.staged_replicas import PlayedEngine
from tests.serving.stubs import Application, make_frontend

TOLD = {"status": "paused", "message": "Generation paused"}


async def follow(engine: PlayedEngine, wanted: type[Pause | Flush], pages: int = 0) -> Any:
    """Wait for the engine's next order of a kind, answer it, and return it."""
    while not isinstance(order := await asyncio.wait_for(engine.requests.get(), 60), wanted):
        assert isinstance(order, Abort), order
    engine.say(Done(order.request_id, pages))
    return order


def test_a_paused_server_starts_nothing_and_goes_on_where_it_was() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            runs = await begin(frontend)
            await engine.next_request()
            pausing = asyncio.create_task(frontend.pause("keep"))
            assert (await follow(engine, Pause)).is_paused
            await pausing
            waits = asyncio.create_task(begin(frontend))
            await asyncio.sleep(0.02)
            assert frontend.is_paused and not waits.done() and not runs.is_closed
            resuming = asyncio.create_task(frontend.resume())
            orders = [await asyncio.wait_for(engine.requests.get(), 60) for _ in range(2)]
            order = next(each for each in orders if isinstance(each, Pause))
            assert not order.is_paused and any(isinstance(each, GenerateRequest) for each in orders)
            engine.say(Done(order.request_id))
            await resuming
            for generation in (runs, await waits):
                engine.emit(generation.request_id, 9, reason="length")
                assert (await generation.wait()).outputs[0].token_ids == [9]

    asyncio.run(play())


def test_a_pause_ends_what_runs_or_waits_for_it_as_it_is_told() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            engine = await stage.ready_engine()
            for mode in ("abort", "wait"):
                runs = await begin(frontend)
                await engine.next_request()
                pausing = asyncio.create_task(frontend.pause(mode))
                await asyncio.sleep(0.03)
                if mode == "wait":
                    assert not pausing.done() and not runs.is_closed
                    engine.emit(runs.request_id, 9, reason="length")
                assert (await follow(engine, Pause)).is_paused
                await pausing
                assert runs.output.outputs[0].finish_reason == ("abort" if mode == "abort" else "length")
                resuming = asyncio.create_task(frontend.resume())
                await follow(engine, Pause)
                await resuming

    asyncio.run(play())


def test_an_engine_that_comes_while_the_server_is_paused_is_paused_too() -> None:
    async def play() -> None:
        async with staged_frontend(restart=True) as (frontend, stage):
            first = await stage.ready_engine()
            pausing = asyncio.create_task(frontend.pause("keep"))
            assert isinstance(await asyncio.wait_for(first.requests.get(), 60), Pause)
            first.die()
            await pausing
            second = await stage.ready_engine()
            assert (await follow(second, Pause)).is_paused

    asyncio.run(play())


def test_requests_end_by_the_ids_that_clients_know() -> None:
    async def play() -> None:
        async with staged_frontend() as (frontend, stage):
            await stage.ready_engine()
            prompts = [await _named(frontend, f"cmpl-a1-{place}", "cmpl-a1") for place in range(2)]
            prompts += [await _named(frontend, name) for name in ("cmpl-a12", "other")]
            CALLER.set("mine")
            prompts.append(await _named(frontend, "chatcmpl-5"))
            assert [frontend.abort([name]) for name in ("cmpl", "cmpl-a1", "mine", "other")] == [0, 2, 1, 1]
            assert [each.is_closed for each in prompts] == [True, True, False, True, True]
            assert frontend.abort(None) == 1

    asyncio.run(play())


async def _named(frontend: Frontend, name: str, answer: str = "") -> Generation:
    return await frontend.generate([5, 6], SamplingParams(max_tokens=2), request_id=name, answer_id=answer)


def test_the_paths_are_those_of_sglang_and_of_vllm() -> None:
    told: list[Any] = []
    frontend = make_frontend()

    async def pause(mode: str) -> None:
        told.append(mode)

    async def resume() -> None:
        told.append("resume")

    async def flush() -> int:
        told.append("flush")
        return 3

    def abort(ids: Any) -> int:
        told.append(ids)
        return 1

    frontend.pause, frontend.resume, frontend.flush_prefix_cache, frontend.abort = pause, resume, flush, abort  # pyright: ignore
    frontend.is_paused = True  # pyright: ignore

    async def play() -> None:
        transport = httpx.ASGITransport(make_app(frontend))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post("/pause?mode=keep&clear_cache=false")).json() == TOLD
            assert (await client.post("/pause")).json() == TOLD
            assert (await client.post("/resume")).json()["status"] == "resumed"
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            assert (await client.post("/pause_generation", json={"mode": "in_place"})).json() == TOLD
            assert (await client.post("/continue_generation", json={})).status_code == 200
            for path in ("/flush_cache", "/reset_prefix_cache"):
                assert (await client.post(path)).json() == {"success": True, "pages": 3}
            assert (await client.post("/abort_request", json={"rid": "a"})).json() == {"aborted": 1}
            assert (await client.post("/abort_request", json={"rid": "", "abort_all": True})).status_code == 200
            assert (await client.post("/abort_requests", json={"request_ids": ["a", "b"]})).status_code == 200
            assert (await client.post("/abort_request", json={})).json()["error"]["param"] == "rid"

    asyncio.run(play())
    modes = ["keep", "abort", "flush", "resume", "keep", "resume", "flush", "flush"]
    assert told == [*modes, ["a"], None, ["a", "b"]]


def test_what_operators_do_is_done_though_there_is_too_much_to_do() -> None:
    document = make_app(make_frontend()).openapi()["paths"]
    posts = {path for path, found in document.items() if "operations" in found.get("post", {}).get("tags", ())}
    assert posts == PATHS


def test_what_is_flushed_is_computed_again(server: Server) -> None:
    body = {"prompt": list(range(20, 220)), "max_tokens": 1, "temperature": 0}

    def cached() -> int:
        return server.post("/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0 and server.post("/flush_cache", None)["pages"] > 0
    assert cached() == 0 and server.get("/server_info/audit") == {"problems": []}
    for path in ("/livez", "/readyz", "/startupz", "/health"):
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_a_stream_that_is_aborted_says_so_and_one_that_is_paused_goes_on(server: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "seed": 5, "stream": True}
    expected = server.post("/v1/completions", {**body, "stream": False})["choices"][0]["text"]
    with server.client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": "abort-me"}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.post("/abort_request", {"rid": "abort-me"}) == {"aborted": 1}
        *_, end, failure = [json.loads(line[6:]) for line in lines if line]
        assert end["choices"][0]["finish_reason"] == "abort" and failure["error"]["code"] == "aborted"
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        said = [next(lines)]
        server.post("/pause_generation", {"mode": "in_place"})
        before = server.get("/server_info/stats")["generation_tokens"]
        assert server.get("/is_paused")["is_paused"] and server.get("/readyz")["phase"] == "ready"
        assert server.get("/server_info/stats")["generation_tokens"] == before
        server.post("/continue_generation", {})
        said += [line for line in lines if line]
    chunks = [json.loads(line[6:]) for line in said if line not in ("data: [DONE]", "")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == expected


COMMANDS: tuple[tuple[str, Any, list[str]], ...] = (
    ("/pause", None, ["abort", "flush"]),
    ("/pause?mode=wait", None, ["wait", "flush"]),
    ("/pause?mode=keep&clear_cache=false", None, ["keep"]),
    ("/pause_generation", {}, ["abort"]),
    ("/pause_generation", {"mode": "abort"}, ["abort"]),
    ("/pause_generation", {"mode": "retract"}, ["keep"]),
    ("/pause_generation", {"mode": "in_place"}, ["keep"]),
    ("/resume", None, ["resume"]),
    ("/continue_generation", {}, ["resume"]),
    ("/flush_cache", None, ["flush"]),
    ("/reset_prefix_cache", None, ["flush"]),
)
"""Path and body of each command, and what it makes the frontend do."""


def test_each_command_does_what_it_does_on_its_own_server() -> None:
    async def pause(mode: str) -> None:
        found.append(mode)

    async def resume() -> None:
        found.append("resume")

    async def flush() -> int:
        found.append("flush")
        return 3

    frontend: Any = make_frontend()
    frontend.pause, frontend.resume, frontend.flush_prefix_cache = pause, resume, flush
    served = Application(frontend)
    for path, body, done in COMMANDS:
        found: list[str] = []
        answer = served.send("POST", path, body)
        assert answer.status_code == 200 and found == done, path
        assert answer.json().get("pages", 3) == 3


@pytest.mark.parametrize(
    ("path", "body", "ids"),
    [
        ("/abort_request", {"rid": "a"}, ["a"]),
        ("/abort_request", {"rid": "a", "abort_all": False}, ["a"]),
        ("/abort_request", {"rid": "a", "abort_all": True}, None),
        ("/abort_request", {"abort_all": True}, None),
        ("/abort_requests", {"request_ids": ["a", "b"]}, ["a", "b"]),
        ("/abort_requests", {"request_ids": []}, []),
        ("/abort_requests", {}, None),
        ("/abort_requests", {"request_ids": None}, None),
    ],
)
def test_an_abort_ends_those_that_it_names_and_all_only_if_it_says_so(path: str, body: Any, ids: Any) -> None:
    asked: list[Any] = []

    def abort(found: Any) -> int:
        asked.append(found)
        return 3

    frontend: Any = make_frontend()
    frontend.abort = abort
    assert Application(frontend).send("POST", path, body).json() == {"aborted": 3} and asked == [ids]


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None, "abort_all": False}])
def test_an_abort_that_names_nothing_is_refused(body: Any) -> None:
    answer = Application(make_frontend()).send("POST", "/abort_request", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rid")
