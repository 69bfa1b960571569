"""JavaScript clients from npm work with this server unmodified: each runs a script that prints its
results."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglcore.config.server_config import ServerConfig
from tests.serving.scripted import MODEL, PROMPT, Stage, call, content, reasoning, staged
from tools.install_linters import program

pytestmark = pytest.mark.needs("clients")

SCRIPTS = Path(__file__).parents[1] / "javascript"
BUILT = Path(__file__).parents[3] / "build" / "javascript"
PATIENCE = 300.0
"""Seconds after which a test gives up."""

TEXT = [content("A"), content("B")]
CALL = call("weather", '{"at"', ': "Rome"}')
CALLED = [["weather", {"at": "Rome"}]]
OBJECT = ['{"sky": ', '"clear"}']


def run(*command: str, folder: Path) -> str:
    """The output of a program; fails with its error messages."""
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ran.returncode == 0, f"{' '.join(command)}: {ran.stderr[-2000:]}\n{ran.stdout[-500:]}"
    return ran.stdout


@pytest.fixture(scope="module")
def folder() -> Path:
    """The scripts with the packages of package-lock.json, which the first process that needs them
    installs."""
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SCRIPTS.iterdir()))).hexdigest()[:16]
    made, begun = BUILT / found, BUILT / "begun"
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_dir():
            shutil.rmtree(begun, ignore_errors=True)
            shutil.copytree(SCRIPTS, begun)
            options = (
                "--no-audit",
                "--no-fund",
                "--ignore-scripts",
                "--fetch-retries",
                "1",
                "--fetch-timeout",
                "60000",
            )
            run(program("npm"), "ci", *options, folder=begun)
            begun.rename(made)
    return made


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig()) as stage:
        yield stage


def told(stage: Stage, folder: Path, script: str, *words: str) -> Any:
    """The output of a script, after a check that it requested every turn of the conversation."""
    found = json.loads(run(program("node"), f"{script}.mjs", stage.url, MODEL, *words, folder=folder))
    assert not stage.script.turns
    return found


def test_openais_client_chats_streams_calls_tools_and_parses(stage: Stage, folder: Path) -> None:
    stage.converse(TEXT, TEXT, CALL, OBJECT, TEXT, TEXT)
    found = told(stage, folder, "openai")
    status, message = found.pop("refused")
    assert status == 400 and "top_p" in message
    assert found == {
        "text": "AB",
        "seedIsExact": True,
        "streamed": "AB",
        "called": CALLED,
        "parsed": {"sky": "clear"},
        "response": "AB",
        "ends": ["response.created", "response.completed"],
        "models": [MODEL],
    }
    schema = stage.script.params[3].grammar
    assert schema is not None and "cloudy" in schema.text


def test_anthropics_client_reads_thinking_streams_and_calls(stage: Stage, folder: Path) -> None:
    stage.converse([reasoning("Hm."), *TEXT], [reasoning("Hm."), *TEXT], CALL)
    found = told(stage, folder, "anthropic")
    status, message = found.pop("refused")
    assert status == 400 and "top_p" in message
    assert found == {
        "content": [["thinking", "Hm."], ["text", "AB"]],
        "streamed": "AB",
        "same": True,
        "called": CALLED,
        "reason": "tool_use",
        "counted": len(PROMPT),
        "models": [MODEL],
    }


@pytest.mark.parametrize("provider", ["chat", "responses", "compatible", "anthropic"])
def test_the_ai_sdk_generates_streams_runs_tools_and_makes_objects(stage: Stage, folder: Path, provider: str) -> None:
    form = call("json", '{"sky": "clear"}') if provider == "anthropic" else OBJECT
    stage.converse(TEXT, TEXT, CALL, TEXT, form)
    found = told(stage, folder, "ai_sdk", provider)
    assert found == {
        "text": "AB",
        "reason": "stop",
        "streamed": "AB",
        "called": CALLED,
        "answered": "AB",
        "object": {"sky": "clear"},
    }
    answered = stage.script.rendered[3]["messages"][-1]
    assert answered["role"] == "tool" and json.loads(answered["content"]) == {"at": "Rome", "sky": "clear"}


@pytest.mark.parametrize("provider", ["openai", "anthropic", "ollama"])
def test_langchain_invokes_streams_binds_tools_and_makes_objects(stage: Stage, folder: Path, provider: str) -> None:
    form = call("sky", '{"sky": "clear"}') if provider == "anthropic" else OBJECT
    stage.converse(TEXT, TEXT, CALL, form)
    found = told(stage, folder, "langchain", provider)
    assert found == {"text": "AB", "tokens": 2, "streamed": "AB", "called": CALLED, "object": {"sky": "clear"}}


def test_ollamas_client_chats_streams_calls_tools_and_lists_models(stage: Stage, folder: Path) -> None:
    stage.converse(TEXT, TEXT, CALL, OBJECT, TEXT)
    found = told(stage, folder, "ollama")
    kind, message = found.pop("refused")
    assert kind == "ResponseError" and "top_p" in message and "[object" not in message
    assert found.pop("version")
    assert found == {
        "text": "AB",
        "streamed": "AB",
        "called": CALLED,
        "parsed": {"sky": "clear"},
        "generated": "AB",
        "models": [f"{MODEL}:latest"],
    }
