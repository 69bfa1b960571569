"""Tests the HTTP server on this device, with an engine process without torch, including structured
output."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from devices.mlx.tests.test_alone import FOREIGN, environment

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """Run a server of the embedded model in its own process on a free port."""
    command = [sys.executable, "-m", "sglcore.cli", "serve", "--device", "mlx", "--port", "0", "--quiet", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """URL of one server for all tests."""
    with serving() as address:
        yield address


def post(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return json.load(answer)


def completion(url: str, prompt: str, **more: Any) -> str:
    return post(url, "/v1/completions", prompt=prompt, **more)["choices"][0]["text"]


def test_it_says_which_device_it_runs_on(url: str) -> None:
    info = get(url, "/server_info")
    assert info["device"] == "mlx" and info["phase"] == "ready"
    assert {row["topic"]: row["effective"] for row in info["ledger"]}["grammar"] == "llguidance"


def test_the_engine_process_loads_no_tensor_library_but_its_own(url: str) -> None:
    code = (
        "import json, sys\n"
        "import sglcore.serving.replicas.engine_process, sglcore.serving.http.server, sglcore_mlx.worker\n"
        f"print(json.dumps(sorted(set({FOREIGN!r}) & set(sys.modules))))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert json.loads(ran.stdout) == []


def test_json_follows_its_schema_beside_free_requests_that_it_does_not_touch(url: str) -> None:
    free = [f"Once upon a time, there was a {kind} who" for kind in ("boy", "fox", "girl")]
    alone = [completion(url, prompt, max_tokens=24, temperature=0) for prompt in free]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}

    def person(seed: int) -> str:
        message = {"role": "user", "content": f"Who is number {seed}?"}
        answer = post(url, "/v1/chat/completions", messages=[message], response_format=form, seed=seed, max_tokens=200)
        assert answer["choices"][0]["finish_reason"] == "stop"
        return answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(12) as pool:
        people = pool.map(person, range(8))
        mixed = pool.map(lambda prompt: completion(url, prompt, max_tokens=24, temperature=0), free)
        for text in people:
            found = json.loads(text)
            assert found.keys() == {"name", "age"} and isinstance(found["age"], int) and len(found["name"]) <= 12
        assert list(mixed) == alone


def test_a_stream_is_the_text_of_the_answer_in_pieces(url: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    whole = completion(url, **body)
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps({**body, "stream": True}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [line[6:].strip() for line in answer if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


def test_a_server_with_proposals_answers_as_one_without_and_counts_them(url: str) -> None:
    asked = [
        {"prompt": "a cat, a dog, a cat, a dog, a cat, a", "max_tokens": 48, "ignore_eos": True, **more}
        for more in ({"temperature": 0}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.8, "top_p": 0.9, "seed": 5})
    ]
    with serving("--speculative", "ngram", "--draft-tokens", "3") as proposing, ThreadPoolExecutor(6) as pool:
        rows = {row["topic"]: row["effective"] for row in get(proposing, "/server_info")["ledger"]}
        assert rows["speculative"] == "ngram, 3 tokens a step"
        found = list(pool.map(lambda body: post(proposing, "/v1/completions", **body), asked))
        assert get(proposing, "/server_info/audit")["problems"] == []
    plain = [post(url, "/v1/completions", **body) for body in asked]
    assert [each["choices"][0]["text"] for each in found] == [each["choices"][0]["text"] for each in plain]
    details = [each["usage"]["completion_tokens_details"] for each in found]
    assert sum(each["accepted_prediction_tokens"] for each in details) > 0


def test_nothing_is_held_afterwards(url: str) -> None:
    assert get(url, "/server_info/audit")["problems"] == []
