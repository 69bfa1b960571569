"""`sglcore serve` with ranks, shards and experts, as a person starts it: processes, one server, and OpenAI's own client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from sglcore.engine.start import embedded_model
from tests.checkpoints import qwen3_moe, save
from tests.laws.engine import environ

ASKED = [{"role": "user", "content": "What is 2 + 3?"}]


@contextmanager
def served(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server's process and its address."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
    command = [sys.executable, "-m", "sglcore.cli", "serve", *words, "--port", "0", "--threads", "1", "--graph", "off"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env={**given, **environ()}, text=True)
    try:
        assert server.stdout is not None
        yield server, next(line for line in server.stdout if line.startswith("serving ")).split(" at ")[1].strip()
    finally:
        server.kill()
        server.wait()


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def answer_of(client: openai.OpenAI) -> str | None:
    found = client.chat.completions.create(model="sglcore-demo", messages=ASKED, temperature=0, max_tokens=20)  # pyright: ignore[reportArgumentType]
    return found.choices[0].message.content


def test_a_server_of_two_ranks_answers_and_says_what_ended_it(tmp_path: Path) -> None:
    with served(tmp_path, "--tp", "2") as (server, url):
        client = client_of(url)
        assert answer_of(client) == "2 + 3 = 5."
        info = json.load(urllib.request.urlopen(f"{url}/server_info"))
        assert "2 processes, each with its part of every layer" in json.dumps(info)
        with pytest.raises(openai.APIError, match="rank [01] .* ended by SIGKILL"):
            for count, _ in enumerate(
                client.completions.create(model="sglcore-demo", prompt="Once", max_tokens=900, stream=True)
            ):
                if count == 3:
                    os.kill(rank_of(server.pid), signal.SIGKILL)
        assert server.wait(60) != 0


def test_a_server_of_two_shards_answers_many_at_once(tmp_path: Path) -> None:
    with served(tmp_path, "--tp", "2", "--dp", "2", "--max-requests", "7") as (_, url), ThreadPoolExecutor(5) as pool:
        client = client_of(url)
        assert list(pool.map(lambda _: answer_of(client), range(5))) == ["2 + 3 = 5."] * 5
        info = json.load(urllib.request.urlopen(f"{url}/server_info"))
        assert "each request's cache is on 1 of 2 ranks" in json.dumps(info)
        assert json.load(urllib.request.urlopen(f"{url}/props"))["total_slots"] == 14


def test_a_server_of_a_sparse_model_in_shards_says_what_transformers_says(tmp_path: Path) -> None:
    raw = json.loads((embedded_model() / "config.json").read_text())
    oracle = qwen3_moe(num_experts=8, max_position_embeddings=256, vocab_size=raw["vocab_size"])
    folder = save(oracle, tmp_path)
    for path in embedded_model().glob("*token*"):
        shutil.copy(path, folder)
    words = ("--model", str(folder), "--tp", "2", "--dp", "2", "--ep", "2", "--served-model-name", "tiny")
    with served(tmp_path, *words) as (_, url):
        ask: Any = {
            "model": "tiny",
            "temperature": 0,
            "max_tokens": 6,
            "logprobs": 0,
            "extra_body": {"ignore_eos": True},
        }
        found = client_of(url).completions.create(prompt=[5, 9, 11, 40], **ask).choices[0].logprobs
        assert found is not None and found.token_logprobs is not None
    ids = [5, 9, 11, 40]
    with torch.no_grad():
        for logprob in found.token_logprobs:
            row = oracle(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert logprob is not None and abs(float(row.max()) - logprob) < 1e-3
            ids.append(int(row.argmax()))


def rank_of(leader: int) -> int:
    """A process of a rank below a server's."""
    found = [leader]
    for pid in found:
        folder = Path(f"/proc/{pid}/task")
        for task in folder.iterdir():
            found += map(int, (task / "children").read_text().split())
    ranks = [pid for pid in found if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    return ranks[1]
