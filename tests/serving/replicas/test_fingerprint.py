"""The fingerprint changes with everything that may change a result, and with nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.serving.replicas.engine_process import fingerprint
from sglcore.serving.replicas.runs import Runs
from tests.serving.scripted import Stage, content, staged

ROW: dict[str, object] = {"topic": "graphs", "effective": "full"}
MEMORY: dict[str, object] = {"topic": "kv cache", "effective": "100 pages"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(np.arange(300_000, dtype="<f4").tobytes())
    return tmp_path


def test_the_same_is_the_same_whatever_memory_there_is(folder: Path) -> None:
    found = fingerprint(folder, "cpu", [ROW, MEMORY])
    assert found == fingerprint(folder, "cpu", [ROW]) and len(found) == len("fp_") + 12


def test_other_weights_of_the_same_size_differ(folder: Path) -> None:
    before = fingerprint(folder, "cpu", [ROW])
    (folder / "model.safetensors").write_bytes(np.arange(1, 300_001, dtype="<f4").tobytes())
    assert fingerprint(folder, "cpu", [ROW]) != before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_one_other_byte_at_the_end_of_a_file_differs(folder: Path, name: str) -> None:
    before = fingerprint(folder, "cpu", [ROW])
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert fingerprint(folder, "cpu", [ROW]) != before


def test_another_device_or_decision_differs(folder: Path) -> None:
    others = {fingerprint(folder, "cpu", [ROW]), fingerprint(folder, "other", [ROW])}
    others |= {fingerprint(folder, "cpu", []), fingerprint(folder, "cpu", [{**ROW, "effective": "off"}])}
    assert len(others) == 4


USER = {"role": "user", "content": "How is it?"}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "How is it?"},
    "/v1/responses": {"input": "How is it?", "store": False},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    "/api/chat": {"messages": [USER]},
}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig()) as stage:
        yield stage


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_an_answer_has_the_fingerprint_of_the_replica_that_gave_it(path: str, streams: bool, stage: Stage) -> None:
    stage.speak(content("A"), content("B"), fingerprint="fp_other")
    answer = httpx.post(f"{stage.url}{path}", json={"stream": streams, **ENDPOINTS[path]}, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert set(re.findall(r'"system_fingerprint": ?"([^"]*)"', answer.text)) == {"fp_other"}


@pytest.mark.parametrize(
    ("marks", "shown"),
    [
        (["fp_1"], "fp_1"),
        (["fp_1", "fp_1"], "fp_1"),
        (["fp_2", "fp_1", "fp_2"], "fp_1,fp_2"),
        (["", "fp_1"], "fp_1"),
        (["", ""], ""),
    ],
)
def test_prompts_of_one_request_have_each_fingerprint_once(marks: list[str], shown: str) -> None:
    generations = [SimpleNamespace(fingerprint=mark, output=None) for mark in marks]
    assert Runs(cast(Any, generations), AsyncExitStack()).fingerprint == shown
