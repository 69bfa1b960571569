"""`sglcore bench`: the load is as requested, latency counts from a request's due time, and failures
are counted."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from sglcore.bench.address import ServerError, address, served_model
from sglcore.bench.figures import figures, goals_of, percentile
from sglcore.bench.load import Offer, run_load
from sglcore.bench.plot import save_plot
from sglcore.bench.reply import Reply
from sglcore.bench.request_record import Record
from sglcore.bench.workload import Job, Span, Workload, make_jobs, span
from sglcore.cli.__main__ import main
from sglcore.cli.bench_table import totals_table
from sglcore.core.errors import ConfigError
from tests.serving.threaded import in_thread

LOAD = Workload(
    num_prompts=300, input_len=Span(5, 9), output_len=Span(2, 4), shared_prefix=16, request_rate=50.0, seed=3
)


def answering() -> FastAPI:
    """A server that streams the requested number of pieces. The prompt's first token selects a
    failure: 1 busy, 2 an error in the stream, 3 a cut stream."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"data": [{"id": "small"}]})

    @app.get("/page/v1/models")
    async def page() -> Response:
        return Response("<html>Welcome</html>", media_type="text/html")

    @app.get("/list/v1/models")
    async def names() -> Response:
        return JSONResponse([{"name": "small"}])

    @app.get("/phases/{phase}/v1/models")
    async def early(phase: str) -> Response:
        return JSONResponse({"data": [{"id": "small"}]})

    @app.get("/phases/{phase}/server_info")
    async def unready(phase: str) -> Response:
        return JSONResponse({"limits": None, "max_model_len": None, "phase": phase})

    @app.get("/server_info")
    async def info() -> Response:
        return JSONResponse({"limits": {"vocab_size": 64}, "max_model_len": 512})

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        sent = await request.json()
        assert sent["ignore_eos"] is True and sent["stream"] is True and sent["model"] == "small"
        if sent["prompt"][0] == 1:
            return JSONResponse({"error": {"message": "64 requests wait already"}}, 429)
        return StreamingResponse(pieces(sent), media_type="text/event-stream")

    return app


async def pieces(sent: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the text of each token, the usage, and the end."""
    for number in range(sent["max_tokens"]):
        choice = {"index": 0, "text": "error x", "finish_reason": None}
        yield f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"
        if sent["prompt"][0] == 2 and number == 1:
            yield 'data: {"error": {"message": "the engine died"}}\n\n'
            return
        if sent["prompt"][0] == 3:
            return
        await asyncio.sleep(0)
    counts = {"prompt_tokens": len(sent["prompt"]), "completion_tokens": sent["max_tokens"]}
    usage = {**counts, "prompt_tokens_details": {"cached_tokens": 4}}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_thread(answering()) as found:
        yield found


def send(url: str, jobs: list[Job], **settings: Any) -> list[Record]:
    seen: list[Record] = []
    offer = Offer(where=address(url), model="small", is_open=settings.pop("is_open", True), **settings)
    found = run_load(offer, jobs, seen.append)
    assert sorted(record.number for record in seen) == [record.number for record in found]
    return found


@pytest.mark.parametrize(("folder", "said"), [("page", "something else than JSON: <html>"), ("list", "no model")])
def test_a_server_of_another_kind_is_an_error_with_its_answer(url: str, folder: str, said: str) -> None:
    assert served_model(address(url)) == "small"
    with pytest.raises(ServerError, match=said):
        served_model(address(f"{url}/{folder}"))


def test_a_seed_repeats_the_load_and_another_changes_it() -> None:
    jobs = make_jobs(LOAD, 64)
    assert jobs == make_jobs(LOAD, 64)
    other = make_jobs(Workload(**{**{name: getattr(LOAD, name) for name in Workload.__slots__}, "seed": 4}), 64)
    assert all(one.prompt != another.prompt for one, another in zip(jobs, other, strict=True))


def test_lengths_prefix_and_tokens_are_as_asked() -> None:
    jobs = make_jobs(LOAD, 64)
    assert {len(job.prompt) - 16 for job in jobs} == {5, 6, 7, 8, 9} and {job.output_len for job in jobs} == {2, 3, 4}
    assert len({job.prompt[:16] for job in jobs}) == 1 and len({job.prompt[16:] for job in jobs}) == 300
    assert {token for job in jobs for token in job.prompt} == set(range(64))


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    gaps = np.diff([0.0, *(job.arrival for job in make_jobs(LOAD, 64))])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.15) and gaps.std() == pytest.approx(1 / 50, rel=0.2)
    assert (gaps > 0).all()
    at_once = make_jobs(Workload(num_prompts=3, input_len=Span(1, 1), output_len=Span(1, 1)), 64)
    assert [job.arrival for job in at_once] == [0.0, 0.0, 0.0]


def test_a_request_that_does_not_fit_the_context_is_refused_before_the_load() -> None:
    with pytest.raises(ConfigError, match=r"29 tokens \(16 shared, up to 9 of its own, up to 4 to generate\).* 28"):
        make_jobs(LOAD, 64, 28)
    assert make_jobs(LOAD, 64, 29)


@pytest.mark.parametrize("text", ["x", "9..5", "0", "1..", "..4"])
def test_a_span_that_is_none_names_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match="random-input-len"):
        span("random-input-len", text)


def test_an_answer_is_read_the_same_wherever_it_is_split() -> None:
    body = b'data: {"choices":[{"text":"a","finish_reason":null}]}\r\n\r\ndata: {"choices":[{"text":""'
    body += b',"finish_reason":"length"}]}\n\ndata: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    chunks = (
        b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:30], body[30:31], body[31:])) + b"0\r\n\r\n"
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    whole = (
        head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks,
        head + b"Content-Length: %d\r\n\r\n" % len(body) + body,
    )
    loop = asyncio.new_event_loop()
    for content in whole:
        for place in range(1, len(content)):
            reply = Reply(b"", lambda: 0.0, loop)
            reply.data_received(content[:place])
            reply.data_received(content[place:])
            assert (len(reply.marks), reply.usage, reply.fault) == (1, {"completion_tokens": 2}, None), place
            assert reply.ended.done()
    loop.close()


def test_latency_counts_from_when_a_request_was_due(url: str) -> None:
    jobs = make_jobs(Workload(num_prompts=12, input_len=Span(4, 4), output_len=Span(3, 3), request_rate=1e5), 64)
    jobs = [Job(job.number, job.arrival, (9, *job.prompt[1:]), job.output_len) for job in jobs]
    held = send(url, jobs, max_concurrency=1)
    assert [record.due for record in held] == [job.arrival for job in jobs]
    assert all(after.sent >= before.end for before, after in pairwise(held))
    assert all(record.ttft >= record.sent - record.due for record in held)
    closed = send(url, jobs, max_concurrency=1, is_open=False)
    assert all(record.due == record.sent for record in closed)


def test_failures_are_counted_by_kind_and_the_others_are_whole(url: str) -> None:
    jobs = [Job(number, 0.0, (first, 7, 7), 3) for number, first in enumerate([9, 1, 2, 1, 3, 9])]
    found = figures(send(url, jobs, is_open=False))
    assert {kind: failures.count for kind, failures in found.failures.items()} == {
        "status 429": 2,
        "error in the stream": 1,
        "no [DONE]": 1,
    }
    assert found.failures["status 429"].first == "64 requests wait already"
    assert (found.requests, found.whole, found.input_tokens, found.output_tokens, found.cached_tokens) == (
        6,
        2,
        6,
        6,
        8,
    )


def test_an_answer_that_takes_too_long_is_a_failure_of_its_own_kind() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def port() -> tuple[asyncio.Server, int]:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        return server, server.sockets[0].getsockname()[1]

    async def scenario() -> list[Record]:
        server, number = await port()
        offer = Offer(where=address(f"127.0.0.1:{number}"), model="small", is_open=True, timeout=0.05)
        async with server:
            return await asyncio.to_thread(run_load, offer, [Job(0, 0.0, (1,), 1)], lambda record: None)

    (record,) = asyncio.run(scenario())
    assert record.fault is not None and record.fault.kind == "timeout"


def test_figures_are_those_of_hand_and_numpy() -> None:
    records = [
        Record(0, 0.0, 0.0, 0.5, (0.1, 0.2, 0.4), 10, 3),
        Record(1, 0.5, 0.7, 2.0, (1.0, 2.0), 20, 2, 5),
    ]
    found = figures(records, {"ttft": 200.0})
    assert (found.seconds, found.output_tokens, found.output_per_s, found.goodput) == (2.0, 5, 2.5, 0.5)
    assert found.latency["ttft"].mean == pytest.approx(300.0) and found.latency["ttft"].max == pytest.approx(500.0)
    assert found.latency["tpot"].p50 == pytest.approx((150 + 1000) / 2)
    assert found.latency["itl"].p50 == pytest.approx(200.0) and found.latency["e2e"].max == pytest.approx(1500.0)
    assert found.lag is not None and found.lag.max == pytest.approx(200.0)
    values = sorted(np.random.default_rng(0).exponential(size=101).tolist())
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.percentile(values, share * 100))


def test_the_acceptance_length_is_over_the_steps_behind_first_tokens(tmp_path: Path) -> None:
    records = [
        Record(0, 0.0, 0.0, 0.5, (0.1, 0.2), 10, 9, proposed_tokens=16, accepted_tokens=4),
        Record(1, 0.0, 0.0, 0.5, (0.1, 0.2), 10, 3, 5, proposed_tokens=8, accepted_tokens=0),
        Record(2, 0.0, 0.0, 0.5, (0.1,), 10, 7),
    ]
    assert [record.acceptance_length for record in records] == [2.0, 1.0, None]
    found = figures(records)
    assert (found.proposed_tokens, found.accepted_tokens) == (24, 4)
    assert found.acceptance_length == pytest.approx(10 / 6)
    assert figures(records[2:]).acceptance_length is None
    save_plot(tmp_path / "drafts.png", records, found, "drafts")
    assert (tmp_path / "drafts.png").read_bytes().startswith(b"\x89PNG")
    assert "1.67 tokens a step" in "".join(str(cell) for cell in totals_table(found).columns[0].cells)


@pytest.mark.parametrize("word", ["ttft", "itl:5", "speed:9", "ttft:fast"])
def test_a_goal_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        goals_of([word])


def test_the_command_prints_a_table_and_writes_json_and_a_plot(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"), "--goodput", "e2e:60000")
    words = ("--num-prompts", "20", "--request-rate", "400", "--random-output-len", "3", "--shared-prefix", "8")
    code = main(("bench", "serve", "--url", url, *words, *files, "-q"))
    written = json.loads((tmp_path / "out.json").read_text())
    assert code == (0 if written["figures"]["whole"] == 20 else 1)
    assert written["workload"]["request_rate"] == 400 and len(written["requests"]) == 20
    assert {row["output_tokens"] for row in written["requests"] if row["error"] is None} == {3}
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    for part in ("TTFT", "p99", "output tokens", "lag", "goodput", f"{written['figures']['whole']} of 20"):
        assert part in shown


def test_the_engine_alone_takes_the_same_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--num-prompts", "3", "--random-input-len", "4..6", "--random-output-len", "2..3", "--max-model-len", "64")
    assert main(("bench", "offline", "-q", *words, "--json", str(tmp_path / "out.json"))) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    load = Workload(num_prompts=3, input_len=Span(4, 6), output_len=Span(2, 3))
    expected = [(len(job.prompt), job.output_len) for job in make_jobs(load, 64)]
    assert [(row["input_tokens"], row["output_tokens"]) for row in written["requests"]] == expected
    assert written["figures"]["whole"] == 3 and written["kind"] == "offline"
    assert "3 of 3" in capsys.readouterr().out


def test_without_matplotlib_a_plot_is_refused_before_the_load(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(("bench", "serve", "--url", url, "--plot", "out.png")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--url", "http://127.0.0.1:9"), "cannot be reached"),
        (("--url", "{url}/phases/warm-up"), "not ready (phase: warm-up); wait until /readyz answers 200"),
        (("--url", "{url}/phases/dead"), "not ready (phase: dead); start it again"),
        (("--url", "{url}/other", "--model-name", "small"), "answered 404: Not Found; give --vocab-size"),
        (("--url", "{url}", "--random-input-len", "900"), "the model takes 512"),
    ],
)
def test_what_can_not_be_measured_is_one_line(
    url: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(("bench", "serve", *(word.format(url=url) for word in words))) == 2
    seen = capsys.readouterr().err
    assert said in seen and seen.count("\n") == 1
