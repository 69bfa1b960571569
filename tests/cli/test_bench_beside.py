"""`sglcore bench serve --long-prompts`: latencies of streaming requests during long prompts are
reported apart from those of other times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from matplotlib.figure import Figure

from sglcore.bench.figures import figures
from sglcore.bench.long_prompt_effect import Beside, awaited, beside, gaps_beside
from sglcore.bench.plot import TOGETHER_MS, _beside
from sglcore.bench.reply import Fault
from sglcore.bench.request_record import Record
from sglcore.bench.workload import Span, Workload, make_jobs
from sglcore.cli.__main__ import main
from sglcore.core.errors import ConfigError
from tests.serving.threaded import in_thread

LONG, QUIET_MS, STALL_MS = 200, 10, 60


def record(number: int, *marks: float, sent: float = 0.0, **given: Any) -> Record:
    """A record with pieces received at these seconds."""
    return Record(number, sent, sent, marks[-1] if marks else sent + 1.0, marks, 5, len(marks), **given)


CHAT = record(0, 1.0, 1.1, 1.2, 1.5, 1.9, 2.0)
PROMPT = record(1, 1.85, sent=1.45, is_long=True)


def test_a_gap_counts_as_beside_a_long_prompt_if_any_of_it_was() -> None:
    quiet, during = gaps_beside([CHAT, PROMPT])
    assert quiet == pytest.approx([0.1, 0.1, 0.1]) and during == pytest.approx([0.3, 0.4])
    assert awaited([CHAT, PROMPT]) == [(1.45, 1.85)]


def test_a_long_prompt_without_an_answer_was_awaited_to_its_end_and_is_not_whole() -> None:
    failed = record(1, sent=1.45, is_long=True, fault=Fault("timeout", "no whole answer"))
    found = beside([CHAT, failed])
    assert awaited([failed]) == [(1.45, 2.45)] and found is not None
    assert (
        (found.prompts, found.first) == (0, None)
        and found.during is not None
        and found.during.max == pytest.approx(400)
    )


def test_the_figures_are_those_of_both_times() -> None:
    found = beside([CHAT, PROMPT])
    assert found is not None
    assert found.quiet is not None and found.during is not None and found.first is not None
    assert (found.quiet.p50, found.quiet.max) == (pytest.approx(100), pytest.approx(100))
    assert (found.during.p50, found.during.max) == (pytest.approx(350), pytest.approx(400))
    assert found.first.p50 == pytest.approx(400), "from when it was sent"
    assert found.ratio("p50") == pytest.approx(3.5) and found.ratio("max") == pytest.approx(4.0)
    written = found.as_json()
    assert written["prompts"] == 1 and written["ratios"] == {"p50": 3.5, "p99": pytest.approx(3.99, abs=0.01)}
    assert beside([CHAT]) is None and Beside(None, None, None, 0).ratio("p50") is None


def test_the_plot_shades_when_a_long_prompt_was_awaited_and_has_all_gaps_of_the_others() -> None:
    panel: Any = Figure().add_subplot()
    _beside(panel, [CHAT, PROMPT, record(2, 3.0, 3.0)])
    (shaded,), (points,) = panel.patches, panel.lines
    assert (shaded.get_x(), shaded.get_x() + shaded.get_width()) == (pytest.approx(1.45), pytest.approx(1.85))
    assert list(points.get_xdata()) == [1.1, 1.2, 1.5, 1.9, 2.0, 3.0]
    assert list(points.get_ydata()) == pytest.approx([100, 100, 300, 400, 100, TOGETHER_MS])
    assert panel.get_yscale() == "log"


def test_long_prompts_are_in_no_latency_of_the_others() -> None:
    found = figures([CHAT, record(1, 9.0, sent=1.0, is_long=True)])
    assert found.latency["ttft"].max == pytest.approx(1000) and found.input_tokens == 10


def test_long_prompts_come_one_after_the_other_and_share_nothing() -> None:
    sizes = {"input_len": Span(3, 3), "output_len": Span(2, 2), "request_rate": 2.0}
    load = Workload(num_prompts=4, long_prompts=3, long_len=50, long_every=0.5, **sizes)
    jobs = make_jobs(load, 1000)
    long = [job for job in jobs if job.is_long]
    assert [job.arrival for job in long] == [0.5, 1.0, 1.5] and [job.number for job in long] == [4, 5, 6]
    assert [job.arrival for job in jobs] == sorted(job.arrival for job in jobs)
    assert len({job.prompt[:8] for job in long}) == 3 and {len(job.prompt) for job in long} == {50}
    others = make_jobs(Workload(num_prompts=4, **sizes), 1000)
    assert [job for job in jobs if not job.is_long] == others, "the others are those of a load without"


@pytest.mark.parametrize("given", [{"long_prompts": -1}, {"long_len": 0}, {"long_every": 0.0}])
def test_numbers_that_make_no_load_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="wanted 0 or more, of at least 1 token, some seconds apart"):
        Workload(**{"num_prompts": 1, "input_len": Span(1, 1), "output_len": Span(1, 1), "long_prompts": 1, **given})


def stalling() -> FastAPI:
    """A server that sends a piece every QUIET_MS, or every STALL_MS during a long prompt, which
    takes 5 * STALL_MS."""
    app, busy = FastAPI(), list[int]()

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"data": [{"id": "small"}]})

    @app.get("/server_info")
    async def info() -> Response:
        return JSONResponse({"limits": {"vocab_size": 64}, "max_model_len": 512})

    async def pieces(sent: dict[str, Any]) -> AsyncIterator[str]:
        if len(sent["prompt"]) == LONG:
            busy.append(1)
            await asyncio.sleep(5 * STALL_MS / 1000)
            busy.pop()
        for _ in range(sent["max_tokens"]):
            yield f"data: {json.dumps({'choices': [{'index': 0, 'text': 'x'}], 'usage': None})}\n\n"
            await asyncio.sleep((STALL_MS if busy else QUIET_MS) / 1000)
        usage = {"prompt_tokens": len(sent["prompt"]), "completion_tokens": sent["max_tokens"]}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return StreamingResponse(pieces(await request.json()), media_type="text/event-stream")

    return app


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_thread(stalling()) as found:
        yield found


def test_a_server_that_stalls_beside_long_prompts_is_seen(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ("--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    words = ("--num-prompts", "3", "--random-output-len", "120", "--max-concurrency", "3", "-q")
    long = ("--long-prompts", "2", "--long-tokens", str(LONG), "--long-every", "0.5")
    assert main(("bench", "serve", "--url", url, *words, *long, *files)) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    found = written["beside_long_prompts"]
    assert found["prompts"] == 2 and found["first_ms"]["p50"] >= 5 * STALL_MS
    assert found["ratios"]["p50"] > 2, found
    assert sum(row["is_long"] for row in written["requests"]) == 2 and written["workload"]["long_prompts"] == 2
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    for part in ("no long prompt awaited", "a long prompt awaited", "times as long", "first token of 2 long prompts"):
        assert part in shown


def test_a_long_prompt_that_does_not_fit_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("bench", "serve", "--url", url, "--long-prompts", "1")) == 2
    seen = capsys.readouterr().err
    assert "a long prompt has 8192 tokens" in seen and "--long-tokens 504 or less" in seen and seen.count("\n") == 1
