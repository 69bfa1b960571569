"""`sglcore serve` as a user types it: flags from the records, other engines' names for them, and
how the process ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from sglcore.cli.__main__ import main
from sglcore.cli.aliases import FLAGS, REFUSED, graph_name
from sglcore.cli.app import make_app
from sglcore.cli.serve import _show
from sglcore.cli.setting_flags import engine_settings, flag_names, split_settings, with_settings
from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.config.settings import settings_of
from sglcore.engine.start import embedded_model
from tests.cli.test_generate import refused, run

SETTINGS = {**settings_of(EngineConfig), **settings_of(ServerConfig)}


@pytest.fixture(scope="module")
def help_text() -> str:
    found = CliRunner().invoke(make_app(), ["serve", "--help"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert found.exit_code == 0
    return found.stdout


def test_every_setting_has_a_flag_its_variable_and_a_line_of_help(help_text: str) -> None:
    assert all(item.help for item in SETTINGS.values())
    joined = " ".join(help_text.split())
    for name, item in SETTINGS.items():
        assert f"[{item.variable}]" in joined, name
        for flag in flag_names(name):
            assert any(f"{flag}{end}" in joined for end in " ,."), flag


def test_no_flag_means_two_settings() -> None:
    flags = [flag for name in SETTINGS for flag in flag_names(name)]
    assert len(flags) == len(set(flags))
    assert SETTINGS.keys() >= FLAGS.keys()


def test_no_command_has_a_flag_twice_and_none_that_is_refused() -> None:
    import typer.main

    commands = typer.main.get_command(make_app()).commands  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("serve", "generate", "chat", "explain"):
        options = [item for item in commands[name].params if item.param_type_name == "option"]
        flags = [flag for item in options for flag in (*item.opts, *item.secondary_opts)]
        assert len(flags) == len(set(flags)) and not set(flags) & REFUSED.keys(), name


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ("-hf", "o/n:Q8_0", "-c", "4096", "-np", "3", "-t", "2"),
            ("o/n:Q8_0", {"max_model_len": 4096, "max_requests": 3, "threads": 2}),
        ),
        (
            ("-m", "x", "--dtype", "half", "--no-enable-prefix-caching"),
            ("x", {"dtype": "float16", "prefix_cache": False}),
        ),
        (("--enforce-eager", "--disable-radix-cache", "--jinja"), (None, {"graph": "off", "prefix_cache": False})),
        (
            ("--embedding", "--async-scheduling", "--graph", "NONE"),
            (None, {"task": "embed", "overlap": True, "graph": "off"}),
        ),
    ],
)
def test_flags_of_other_engines_say_ours(words: tuple[str, ...], wanted: tuple[str | None, dict[str, object]]) -> None:
    app, seen = typer.Typer(), []

    def serve(
        model_path: Annotated[str | None, typer.Option(*flag_names("model"))] = None, settings: Any = None
    ) -> None:
        seen.append((model_path, engine_settings(settings)))

    app.command()(with_settings(serve, EngineConfig, ServerConfig))
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0 and seen == [wanted], found.output


@pytest.mark.parametrize("flag", ["--replicas", "--data-parallel-size", "--dp-size", "-dp"])
def test_other_engines_data_parallel_size_is_the_number_of_replicas(flag: str) -> None:
    app, seen = typer.Typer(), list[Any]()

    def serve(settings: Any = None) -> None:
        seen.append(split_settings(settings, ServerConfig))

    app.command()(with_settings(serve, EngineConfig, ServerConfig))
    found = CliRunner().invoke(app, (flag, "3"))
    assert found.exit_code == 0 and seen == [{"replicas": 3}], found.output


@pytest.mark.parametrize("flag", REFUSED)
def test_a_flag_that_equals_none_of_ours_names_what_to_do(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("serve", flag, "1")) == main(("serve", f"{flag}=1")) == 2
    said = capsys.readouterr().err
    assert said == f"error: {flag} is no flag of sglcore; {REFUSED[flag]}\n" * 2


def test_lists_become_the_tuples_of_their_record() -> None:
    given = {"served_model_name": ["a", "b"], "port": 1, "graph_buckets": [1, 2]}
    assert split_settings(given, ServerConfig) == {"served_model_name": ("a", "b"), "port": 1}
    assert split_settings(given, EngineConfig) == {"graph_buckets": (1, 2)}


@pytest.mark.parametrize(
    ("word", "ours"),
    [("full", "full"), ("NONE", "off"), ("FULL_DECODE_ONLY", "full"), ("eager", "off"), ("odd", "odd")],
)
def test_graph_kinds_may_have_the_names_of_other_engines(word: str, ours: str) -> None:
    assert graph_name(word) == ours


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--device", "nope"), ("device 'nope'", "wanted one of")),
        (("/no/such/model",), ("/no/such/model", "config.json")),
        (("a", "--model-path", "b"), ("'a'", "'b'", "name one")),
        (("--graph", "full", "--enforce-eager"), ("--graph full", "--enforce-eager")),
        (("--overlap", "--disable-overlap-schedule"), ("--overlap and", "--disable-overlap-schedule")),
        (("--log-level", "loud"), ("log_level is 'loud'", "debug, info")),
        (("--port", "70000"), ("port is 70000",)),
        (("--chat-template", "/no/such/file"), ("chat_template /no/such/file",)),
        (("--tool-parser", "hermes"), ("hermes",)),
        (("--api-key", "a key"), ("key 1 of api_key",)),
        (("--kv-cache-memory", "lots"), ("kv_cache_memory is 'lots'", "512M")),
    ],
)
def test_what_can_not_start_is_one_line_and_exit_code_2(words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    refused(run("serve", "--port", "0", *words), *parts)


def test_a_wrong_flag_names_the_nearest() -> None:
    found = run("serve", "--prot", "1")
    assert found.returncode == 2 and "--port" in found.stderr


@pytest.mark.parametrize(
    ("generates", "labels", "skips", "shown", "other"),
    [
        (True, 0, False, "/v1/messages", "/v1/embeddings"),
        (False, 0, False, "/v1/embeddings", "/v1/chat"),
        (False, 1, False, "/v1/rerank", "/v1/embeddings"),
        (True, 0, True, "/generate", "/v1/chat"),
        (False, 0, True, "/v1/embeddings", "/v1/score"),
    ],
)
def test_the_banner_lists_the_endpoints_that_the_model_has(
    generates: bool, labels: int, skips: bool, shown: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"device": "acme", "distribution": "acme", "version": "1", "device_evidence": "", "ledger": []}
    seconds, limits = {"model": 0.5, "total": 1.0}, {"num_labels": labels}
    info = SimpleNamespace(generates=generates, limits=limits, seconds=seconds, **told)
    health = SimpleNamespace(ready=True, live=True)
    config, form = EngineConfig(skip_tokenizer=skips), SimpleNamespace(rows=[])
    frontend: Any = SimpleNamespace(health=health, info=info, names=("m",), format=form, engine_config=config)
    asyncio.run(_show(frontend, "http://here", quiet=False))
    said = capsys.readouterr().out
    assert said.startswith("serving m at http://here\n") and shown in said and other not in said


def test_a_port_in_use_is_an_error_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        refused(run("serve", "--port", str(taken.getsockname()[1])), "cannot listen at", "--port")


def test_a_broken_checkpoint_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(embedded_model(), tmp_path / "model"))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    found = run("serve", str(folder), "--port", "0")
    refused(found, f"error: {folder / 'model.safetensors'} is damaged")


@pytest.fixture
def started() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server as a terminal does, in its own process group; yields it and its URL."""
    command = [sys.executable, "-m", "sglcore.cli", "serve", "--port", "0"]
    environment = {**os.environ, "COLUMNS": "160"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_in_mid_stream_ends_the_stream_whole_and_the_server_with_0(
    started: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = started
    body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        first = answer.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to the whole process group
        lines = [first, *answer]
    assert [line for line in lines if line.startswith(b"data: ")][-1] == b"data: [DONE]\n"
    assert process.wait(30) == 0
    assert process.stderr is not None
    shown = process.stderr.read()
    assert "kv cache" in shown and "Traceback" not in shown


def test_a_second_ctrl_c_stops_at_once(started: tuple[subprocess.Popen[str], str]) -> None:
    process, url = started
    body = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 16}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        os.killpg(process.pid, signal.SIGINT)
        while "draining" not in urllib.request.urlopen(f"{url}/livez", timeout=60).read().decode():
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        with suppress(http.client.IncompleteRead):
            assert b"[DONE]" not in answer.read()
        assert process.wait(60) == 1
