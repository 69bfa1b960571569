"""`sglcore serve --role prompt` and `--role decode` as a user starts them: two servers, and
OpenAI's own client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from tests.laws.engine import environ
from tests.pages.test_tcp_pages import until

ASKED = [{"role": "user", "content": "What is 2 + 3?"}]
WORDS = ("--port", "0", "--threads", "1", "--graph", "off", "--pages-secret", "word")


@contextmanager
def server(log: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server; yield its process and address once it serves."""
    command = [sys.executable, "-m", "sglcore.cli", "serve", *WORDS, *words]
    given = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, env={**given, **environ()}, text=True
        )
    try:
        assert process.stdout is not None
        url = next((line for line in process.stdout if line.startswith("serving ")), "")
        assert url, log.read_text()
        yield process, url.split(" at ")[1].strip()
    finally:
        process.kill()
        process.wait()


def ledger(url: str) -> dict[str, dict[str, str]]:
    """A server's ledger rows, by topic."""
    return {row["topic"]: row for row in json.load(urllib.request.urlopen(f"{url}/server_info"))["ledger"]}


def figure(url: str, name: str) -> float:
    """The sum of a metric."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_a_server_that_decodes_answers_by_prompts_of_another(tmp_path: Path) -> None:
    with server(tmp_path / "prompt", "--role", "prompt", "--pages-address", "127.0.0.1:0") as (prompts, first):
        address = ledger(first)["role"]["reason"].split(" send prompts to ")[1].split(" ")[0]
        with server(tmp_path / "decode", "--disaggregation-mode", "decode", "--peers", address) as (_, second):
            assert ledger(second)["role"]["effective"] == "decode"
            assert ledger(second)["page layout"] == ledger(first)["page layout"]
            check_answers(second)
            check_grammar(second)
            prompts.kill()
            prompts.wait()
            check_failures(second, address)


def check_answers(url: str) -> None:
    """Answers of one protocol, whole and streamed. The decode engine computes one token of each
    prompt, including the two of the warm-up."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    whole = client.chat.completions.create(model="sglcore-demo", messages=ASKED, temperature=0, max_tokens=20)  # pyright: ignore[reportArgumentType]
    assert whole.choices[0].message.content == "2 + 3 = 5."
    chunks = client.chat.completions.create(  # pyright: ignore[reportCallIssue]
        model="sglcore-demo",
        messages=ASKED,  # pyright: ignore[reportArgumentType]
        temperature=0,
        max_tokens=20,
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "2 + 3 = 5."
    until(lambda: figure(url, "sglcore_prompt_tokens_computed_total") == 4)


def check_grammar(url: str) -> None:
    """The request's grammar holds for the first token, sampled on the prompt engine, and for the
    others."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"a": digit}, "required": ["a"], "additionalProperties": False}
    answer = client.chat.completions.create(  # pyright: ignore[reportCallIssue]
        model="sglcore-demo",
        messages=ASKED,  # pyright: ignore[reportArgumentType]
        n=2,
        seed=4,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},  # pyright: ignore[reportArgumentType]
    )
    for choice in answer.choices:
        assert json.loads(choice.message.content or "")["a"] in range(10)


def check_failures(url: str, address: str) -> None:
    """Without the other engine, requests get status 503 with a retry-after, and the readiness probe
    fails with the reason."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with pytest.raises(
        openai.InternalServerError, match=f"no prompt engine of {address} can be reached|prompt is lost"
    ) as told:
        client.chat.completions.create(model="sglcore-demo", messages=ASKED, temperature=0, max_tokens=20)  # pyright: ignore[reportArgumentType]
    assert (told.value.status_code, told.value.response.headers["retry-after"]) == (503, "1")
    until(lambda: readiness(url).get("phase") == "unable")
    assert readiness(url)["reason"] == f"no prompt engine of {address} can be reached"


def readiness(url: str) -> dict[str, str]:
    """The body of a failing readiness probe; empty if the server is ready."""
    try:
        urllib.request.urlopen(f"{url}/readyz")
    except urllib.error.HTTPError as answer:
        return json.load(answer)
    return {}
