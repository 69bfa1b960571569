"""`sglcore bench serve` and `sglcore chat --url` with the real server."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from sglcore.cli.__main__ import main
from tests.serving.servers import Server


def settled(server: Server) -> Any:
    """The counters once no request runs, from reports that arrive from now on (an idle engine sends
    reports too)."""
    asked = time.time()
    while True:
        found = server.get("/server_info/stats")
        newest = found["time"] - max(replica["report_age"] for replica in found["replicas"])
        if newest > asked and found["running"] == found["waiting"] == 0:
            return found
        time.sleep(0.05)


def test_a_load_ends_whole_with_the_tokens_that_were_asked_for(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = settled(server)
    words = ("--num-prompts", "8", "--request-rate", "50", "--random-output-len", "4", "--shared-prefix", "64")
    assert main(("bench", "serve", "-q", "--url", server.url, *words, "--json", str(tmp_path / "out.json"))) == 0
    after = settled(server)
    found = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert (found["whole"], found["output_tokens"]) == (8, 32)
    assert after["generation_tokens"] - before["generation_tokens"] == 32
    assert after["prompt_tokens"] - before["prompt_tokens"] == found["input_tokens"]
    assert "8 of 8" in capsys.readouterr().out


def test_a_chat_streams_and_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nHello again\n"))
    assert main(("chat", "--url", server.url, "--temperature", "0", "--max-tokens", "12")) == 0
    seen = capsys.readouterr()
    assert seen.out.startswith("Hello!") and seen.err.count("tokens/s") == 2
