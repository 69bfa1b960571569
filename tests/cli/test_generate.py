"""`sglcore generate` and `explain` as a user runs them: text, banner, figures, and one line for
every mistake."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.cli.generate import _complete
from sglcore.core.errors import SglcoreError
from sglcore.engine.start import embedded_model
from sglcore.sampling.params import SamplingParams
from tests import warm
from tests.cli.in_process import run_here

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


def run(*words: str, text: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `sglcore WORDS` in this process with a standard input."""
    return run_here(words, {"COLUMNS": "160", **environ}, text)


def run_alone(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process that has imported nothing of sglcore."""
    return warm.run(("-m", "sglcore.cli", *words), Path.cwd(), {**ENVIRONMENT, **environ})


def refused(found: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The command ended with exit code 2 and one line that names all parts, without a traceback."""
    assert found.returncode == 2, found.stderr
    lines = [line for line in found.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), found.stderr
    for part in parts:
        assert part in lines[0]
    assert found.stdout == ""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the embedded model that a test may damage."""
    return Path(shutil.copytree(embedded_model(), tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_text_goes_to_the_output_and_decisions_to_the_error_stream() -> None:
    words = ("generate", "--prompt", "Once upon a time", "--max-tokens", "12")
    command = [sys.executable, "-m", "sglcore.cli", *words]
    found = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert found.stdout.startswith("Once upon a time") and len(found.stdout) > len("Once upon a time") + 10
    for word in ("sglcore", "cpu", "device", "model", "kv cache", "--verbose", "12 tokens", "tokens/s", "seed"):
        assert word in found.stderr
    assert "attention" not in found.stderr and len(found.stderr.splitlines()) < 12


def test_quiet_prints_the_text_alone_and_a_seed_repeats_it() -> None:
    words = ("generate", "-q", "--prompt", "The", "--max-tokens", "9", "--temperature", "1.2", "--seed", "5")
    first, second = run_alone(*words), run(*words)
    assert first.stderr == second.stderr == "" and first.stdout == second.stdout


def test_chat_answers_and_stops() -> None:
    found = run("generate", "--chat", "--prompt", "Hello")
    assert found.returncode == 0 and "ended by stop" in found.stderr and found.stdout.strip()


def test_a_prompt_is_read_from_standard_input() -> None:
    found = run("generate", "-q", "--prompt", "-", "--max-tokens", "4", text="def add(a, b):")
    assert found.returncode == 0
    assert found.stdout.strip()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["/no/such/model"], ["/no/such/model", "embedded"]),
        (["--temperature", "-1"], ["temperature", "-1.0"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--device", "nowhere"], ["nowhere", "pip install sglcore-nowhere", "cpu"]),
        (["--dtype", "int3"], ["int3", "bfloat16"]),
        (["--graph", "full"], ["full", "compiled"]),
        (["--attention-backend", "other"], ["other", "reference"]),
        (["--max-model-len", "99999"], ["99999", "1024"]),
        (["--kv-cache-memory", "1K"], ["KV memory"]),
        (["--kv-cache-memory", "lots"], ["lots", "512M"]),
        (["--threads", "0"], ["threads", "0"]),
        (["--max-tokens", "0"], ["max_tokens", "0"]),
    ],
)
def test_a_wrong_setting_is_one_line(words: list[str], parts: list[str]) -> None:
    refused(run("generate", "-q", "--prompt", "Hi", *words), *parts)


def test_a_wrong_variable_is_one_line() -> None:
    refused(run_alone("generate", "-q", "--prompt", "Hi", SGLCORE_DEVICE="nowhere"), "nowhere", "SGLCORE_DEVICE")
    refused(run("generate", "-q", "--prompt", "Hi", SGLCORE_PAGE_SIZE="big"), "SGLCORE_PAGE_SIZE", "big")


def test_a_prompt_longer_than_the_context_is_one_line() -> None:
    found = run("generate", "-q", "--prompt", "word " * 3000)
    refused(found, "1024", "tokens")


def test_an_error_is_the_first_thing_on_the_screen() -> None:
    found = run_alone("generate", "/no/such/model", "--prompt", "Hi")
    assert found.stderr.startswith("error: ") and found.returncode == 2


def test_an_answer_that_fails_is_an_error_even_where_nothing_else_is_said() -> None:
    output = SimpleNamespace(finished=True, outputs=[SimpleNamespace(error="the device is gone")])
    llm: Any = SimpleNamespace(prompt=lambda text: [1], engine=SimpleNamespace(add=lambda ids, params: output))
    with pytest.raises(SglcoreError, match="the device is gone"):
        _complete(llm, "", SamplingParams(), chat=False, quiet=True)


def test_an_unknown_flag_is_a_usage_error() -> None:
    found = run("generate", "--nope")
    assert found.returncode == 2 and "--nope" in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["TotallyNewForCausalLM"]}, ["TotallyNewForCausalLM", "LlamaForCausalLM", "docs/models.md"]),
        ({"architectures": None}, ["architecture"]),
        ({"hidden_size": 128}, ["shape", "config.json"]),
        ({"num_hidden_layers": 9}, ["layers.", "not in the checkpoint"]),
        ({"num_hidden_layers": 2}, ["does not use"]),
        ({"vocab_size": None}, ["vocab_size"]),
    ],
)
def test_a_config_that_does_not_fit_is_one_line(checkpoint: Path, changes: dict[str, Any], parts: list[str]) -> None:
    edit_config(checkpoint, **changes)
    refused(run("generate", "-q", str(checkpoint), "--prompt", "Hi"), *parts)


def test_a_damaged_checkpoint_is_one_line(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    refused(run("generate", "-q", str(checkpoint), "--prompt", "Hi"), "model.safetensors")
    weights.unlink()
    refused(run("generate", "-q", str(checkpoint), "--prompt", "Hi"), "model.safetensors")
    (checkpoint / "config.json").write_text("{ not json")
    refused(run("generate", "-q", str(checkpoint), "--prompt", "Hi"), "config.json")


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(run("generate", "-q", str(checkpoint), "--prompt", "Hi"), "model-00002-of-00002.safetensors")


def test_a_missing_tokenizer_is_one_line(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    refused(run("generate", "-q", str(checkpoint), "--prompt", "Hi"), "tokenizer.json")


def _heed_interrupts() -> None:
    """Restore the default handler: a shell ignores interrupts for tests in the background, and
    child processes inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_interrupting_ends_at_once_without_a_traceback() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sglcore.cli",
            "generate",
            "-q",
            "--prompt",
            "Once",
            "--max-tokens",
            "900",
            "--ignore-eos",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=_heed_interrupts,
    )
    assert process.stdout is not None
    process.stdout.read(8)
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert len(rest.split()) < 300, "it stopped long before its 900 tokens"


def test_explain_prints_every_decision_with_its_remedy() -> None:
    found = run("explain", "--json")
    rows = {row["topic"]: row for row in json.loads(found.stdout)["decisions"]}
    assert {"device", "model", "dtype", "threads", "attention", "kv cache", "graph", "kernels"} <= set(rows)
    assert all(row["reason"] for row in rows.values())
    assert "--attention-backend" in run("explain", "attention").stdout
    named = json.loads(run("explain", str(embedded_model()), "--json").stdout)["decisions"]
    assert [row["effective"] for row in named if row["topic"] == "model"] == [str(embedded_model())]
    refused(run("explain", "the-weather"), "the-weather", "attention")
