"""GuideLLM measures this server unmodified, with its own synthetic texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import Server

pytestmark = pytest.mark.needs("clients")

MODEL = Path(__file__).parents[3] / "sglcore" / "assets" / "demo"
PROMPT, ANSWER, REQUESTS = 24, 8, 4
"""Tokens of each request, and number of requests."""
ENVIRON = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}


@pytest.fixture(scope="module")
def benchmarks(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """GuideLLM's results at one rate."""
    report = tmp_path_factory.mktemp("guidellm") / "report.json"
    words = {
        "--backend": f"kind=openai_http,target={server.url}",
        "--profile": json.dumps({"kind": "constant", "rate": [20]}),
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={MODEL}",
        "--data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
        "--output": f"kind=json,path={report}",
    }
    command = [sys.executable, "-m", "guidellm", "run", *(part for item in words.items() for part in item)]
    done = subprocess.run(
        [*command, "--disable-console"], env={**os.environ, **ENVIRON}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(report.read_text())["benchmarks"]


def test_every_request_is_answered_as_it_was_asked(benchmarks: list[dict[str, Any]]) -> None:
    assert len(benchmarks) == 1
    for found in benchmarks:
        metrics = found["metrics"]
        assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
        for request in found["requests"]["successful"]:
            assert request["output_tokens"] == ANSWER
            assert PROMPT <= request["prompt_tokens"] <= PROMPT + 8


def test_what_is_measured_is_of_one_piece(benchmarks: list[dict[str, Any]]) -> None:
    for found in benchmarks:
        for request in found["requests"]["successful"]:
            first, between = request["time_to_first_token_ms"], request["inter_token_latency_ms"]
            whole = 1000 * request["request_latency"]
            assert 0 < first <= whole and first + between * (ANSWER - 1) == pytest.approx(whole, rel=0.5)
