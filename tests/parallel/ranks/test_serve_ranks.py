"""`sglcore serve` with ranks, shards and experts, started as a user does: processes, one server,
and OpenAI's own client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
import torch

from sglcore.engine.start import embedded_model
from tests.checkpoints import qwen3_moe, save
from tests.laws.engine import environ

ASKED: Any = [{"role": "user", "content": "What is 2 + 3?"}]


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def answer(self) -> str | None:
        asked = self.client.chat.completions.create(model="sglcore-demo", messages=ASKED, temperature=0, max_tokens=20)
        return asked.choices[0].message.content

    def kill_rank(self) -> None:
        """Kill the last of the ranks below the server."""
        os.kill(ranks_of(self.process.pid)[-1], signal.SIGKILL)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """A function that starts a server of two ranks, with more flags; all servers are ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> Server:
        words = ("serve", "--tp", "2", "--port", "0", "--threads", "1", "--graph", "off", *flags)
        command = [sys.executable, "-m", "sglcore.cli", *words]
        given = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env={**given, **environ()}, text=True
            )
        started.append(process)
        assert process.stdout is not None
        return Server(
            process, next(line for line in process.stdout if line.startswith("serving ")).split(" at ")[1].strip()
        )

    yield start
    for process in started:
        process.kill()
        process.wait()


def ranks_of(leader: int) -> list[int]:
    """The rank processes below a server."""
    found = [leader]
    for pid in found:
        folder = Path(f"/proc/{pid}/task")
        for task in folder.iterdir():
            found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_server_of_two_ranks_answers_and_says_what_ended_it(serve: Callable[..., Server]) -> None:
    server = serve()
    assert server.answer() == "2 + 3 = 5."
    info = json.load(urllib.request.urlopen(f"{server.url}/server_info"))
    assert "2 processes, each with its part of every layer" in json.dumps(info)
    assert len(ranks_of(server.process.pid)) == 2
    with pytest.raises(openai.APIError, match="rank [01] .* ended by SIGKILL"):
        read_and_kill(server)
    assert server.process.wait(60) != 0


def read_and_kill(server: Server) -> None:
    """Read a stream and kill a rank after a few of its events."""
    for count, _ in enumerate(
        server.client.completions.create(model="sglcore-demo", prompt="Once", max_tokens=900, stream=True)
    ):
        if count == 3:
            server.kill_rank()


def test_a_server_that_restarts_answers_the_next_request(serve: Callable[..., Server]) -> None:
    server = serve("--restart")
    assert server.answer() == "2 + 3 = 5."
    before = ranks_of(server.process.pid)
    with pytest.raises(openai.APIError, match="rank [01] .* ended by SIGKILL"):
        read_and_kill(server)
    assert server.answer() == "2 + 3 = 5.", "a request waits for the ranks that come up"
    after = ranks_of(server.process.pid)
    assert len(after) == 2 and not set(before) & set(after)
    assert server.process.poll() is None


def test_every_open_request_is_told_soon_what_ended_it(serve: Callable[..., Server]) -> None:
    """For streams that have begun, and for requests without an answer so far."""
    server, ended = serve(), []

    def ask(stream: bool) -> None:
        try:
            for _ in server.client.completions.create(
                model="sglcore-demo", prompt="Once", max_tokens=900, stream=stream, extra_body={"ignore_eos": True}
            ):
                pass
        except openai.APIError as error:
            ended.append((time.monotonic(), str(error)))

    threads = [Thread(target=ask, args=(stream,)) for stream in (True, False) * 3]
    for thread in threads:
        thread.start()
    wait_until_they_run(server, len(threads))
    killed = time.monotonic()
    server.kill_rank()
    for thread in threads:
        thread.join(60)
    assert len(ended) == len(threads), "one was answered to its end, or cut"
    assert all("ended by SIGKILL" in said for _, said in ended)
    assert max(at for at, _ in ended) - killed < 10.0  # takes 0.1 s on an idle machine


def wait_until_they_run(server: Server, count: int) -> None:
    end = time.monotonic() + 60
    while json.load(urllib.request.urlopen(f"{server.url}/server_info/stats"))["running"] < count:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_replicas_of_two_ranks_each_serve_and_one_goes_on_without_the_other(serve: Callable[..., Server]) -> None:
    server = serve("--replicas", "2")
    assert len(ranks_of(server.process.pid)) == 4
    assert server.answer() == "2 + 3 = 5."
    server.kill_rank()
    assert server.answer() == "2 + 3 = 5."
    assert server.process.poll() is None


def test_a_server_of_two_shards_answers_many_at_once(serve: Callable[..., Server]) -> None:
    server = serve("--dp", "2", "--max-requests", "7")
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(lambda _: server.answer(), range(5))) == ["2 + 3 = 5."] * 5
    info = json.load(urllib.request.urlopen(f"{server.url}/server_info"))
    assert "each request's KV cache is on 1 of 2 ranks" in json.dumps(info)
    assert json.load(urllib.request.urlopen(f"{server.url}/props"))["total_slots"] == 14


def test_a_server_of_a_sparse_model_in_shards_says_what_transformers_says(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    raw = json.loads((embedded_model() / "config.json").read_text())
    oracle = qwen3_moe(num_experts=8, max_position_embeddings=256, vocab_size=raw["vocab_size"])
    folder = save(oracle, tmp_path)
    for path in embedded_model().glob("*token*"):
        shutil.copy(path, folder)
    server = serve("--model", str(folder), "--dp", "2", "--ep", "2", "--served-model-name", "tiny")
    ask: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6, "logprobs": 0, "extra_body": {"ignore_eos": True}}
    found = server.client.completions.create(prompt=[5, 9, 11, 40], **ask).choices[0].logprobs
    assert found is not None and found.token_logprobs is not None
    ids = [5, 9, 11, 40]
    with torch.no_grad():
        for logprob in found.token_logprobs:
            row = oracle(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert logprob is not None and abs(float(row.max()) - logprob) < 1e-3
            ids.append(int(row.argmax()))
