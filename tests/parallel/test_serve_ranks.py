"""`sglcore serve --tp 2` as a person starts it: two processes, one server, and OpenAI's own client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest

from tests.laws.engine import environ

ASKED = [{"role": "user", "content": "What is 2 + 3?"}]


def test_a_server_of_two_ranks_answers_and_says_what_ended_it(tmp_path: Path) -> None:
    words = ("serve", "--tp", "2", "--port", "0", "--threads", "1", "--graph", "off")
    command = [sys.executable, "-m", "sglcore.cli", *words]
    given = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env={**given, **environ()}, text=True)
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("serving ")).split(" at ")[1].strip()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(model="sglcore-demo", messages=ASKED, temperature=0, max_tokens=20)  # pyright: ignore[reportArgumentType]
        assert answer.choices[0].message.content == "2 + 3 = 5."
        info = json.load(urllib.request.urlopen(f"{url}/server_info"))
        assert "2 processes, each with its part of every layer" in json.dumps(info)
        with pytest.raises(openai.APIError, match="rank [01] .* ended by SIGKILL"):
            for count, _ in enumerate(
                client.completions.create(model="sglcore-demo", prompt="Once", max_tokens=900, stream=True)
            ):
                if count == 3:
                    os.kill(rank_of(server.pid), signal.SIGKILL)
        assert server.wait(60) != 0
    finally:
        server.kill()
        server.wait()


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
