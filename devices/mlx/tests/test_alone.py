"""Tests that the package runs without torch: every command with the embedded model, and a check of
the imported modules.

Where torch is installed, these tests check that it is not imported; one CI lane runs them without
torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "sglcore_mlx"
FOREIGN = ("torch", "transformers", "mlx_lm", "triton")
"""Modules that neither this package nor the parts of the core that it uses may import."""
PROMPT = "Once upon a time"

AUDIT = """
import importlib, json, sys
foreign, modules, generates = json.loads(sys.argv[1])
for name in modules:
    importlib.import_module(name)
text = ""
if generates:
    from sglcore import LLM, SamplingParams
    params = [SamplingParams(temperature=0.0, max_tokens=8), SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=8)]
    with LLM(device="mlx", max_requests=2) as llm:
        text = [output.outputs[0].text for output in llm.generate(["Once upon a time"] * 2, params)]
print(json.dumps({"loaded": sorted(set(foreign) & set(sys.modules)), "text": text}))
"""


def run(*words: str, environ: Mapping[str, str] | None = None, folder: Path | None = None) -> Any:
    """Run a new Python interpreter with these arguments, without the test process's settings."""
    return subprocess.run(
        (sys.executable, *words),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=folder,
        env={**environment(), **(environ or {})},
    )


def environment() -> dict[str, str]:
    """Return the environment variables without the test process's settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
    return {**clean, "COLUMNS": "200"}


def sglcore(*words: str, environ: Mapping[str, str] | None = None, folder: Path | None = None) -> Any:
    """Run the command `sglcore`."""
    return run("-m", "sglcore.cli", *words, environ=environ, folder=folder)


def audit(modules: list[str], generates: bool) -> dict[str, Any]:
    """Return what a new interpreter loads when it imports modules, and optionally generates."""
    ran = run("-c", AUDIT, json.dumps([FOREIGN, modules, generates]))
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def modules() -> list[str]:
    """Return the names of all modules of the package, from its files."""
    names = (path.relative_to(PACKAGE.parent).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py")))
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]


def test_generating_greedily_and_by_chance_loads_none_of_the_foreign_modules() -> None:
    seen = audit([], generates=True)
    assert seen["loaded"] == []
    assert all(text.strip() for text in seen["text"])


def test_every_module_of_the_package_can_be_imported_and_loads_none_of_them() -> None:
    found = modules()
    assert "sglcore_mlx.worker" in found
    assert audit(found, generates=False)["loaded"] == []


def test_the_audit_sees_what_is_loaded() -> None:
    planted = "import sys, types\nsys.modules['torch'] = types.ModuleType('torch')\n"
    ran = run("-c", planted + AUDIT, json.dumps([FOREIGN, [], False]))
    assert json.loads(ran.stdout)["loaded"] == ["torch"], ran.stderr


def test_a_prompt_is_completed_from_the_command_line(tmp_path: Path) -> None:
    words = ("generate", "--device", "mlx", "--prompt", PROMPT, "--max-tokens", "12", "--quiet")
    first, second = (sglcore(*words, folder=tmp_path) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.split()) >= 8
    assert second.stdout == first.stdout


def test_a_seed_repeats_a_sampled_text_and_the_banner_says_which_device_ran() -> None:
    words = ("generate", "--device", "mlx", "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "1", "--seed")
    first, again, other = (sglcore(*words, seed) for seed in ("7", "7", "8"))
    assert first.returncode == 0 and "mlx" in first.stderr, first.stderr
    assert first.stdout == again.stdout != other.stdout


def test_explain_gives_a_row_and_a_reason_for_every_decision() -> None:
    ran = sglcore("explain", "--device", "mlx")
    assert ran.returncode == 0, ran.stderr
    for topic in ("device", "kv cache", "attention", "dtype"):
        assert topic in ran.stdout


def test_devices_lists_it_and_shows_that_it_is_usable_by_name() -> None:
    ran = sglcore("devices", "mlx", "--json")
    assert ran.returncode == 0, ran.stderr
    (device,) = json.loads(ran.stdout)["devices"]
    assert device["name"] == "mlx" and device["error"] is None
    assert all(fact["holds"] for fact in device["facts"].values())
    assert "mlx" in sglcore("devices").stdout


def test_doctor_finds_nothing_bad_where_it_was_asked_for() -> None:
    ran = sglcore("doctor", "--json", environ={"SGLCORE_DEVICE": "mlx"})
    checks = {check["topic"]: check for check in json.loads(ran.stdout)["checks"]}
    assert ran.returncode == 0, [check for check in checks.values() if check["verdict"] == "bad"]
    assert checks["choice"]["found"].startswith("mlx")
    assert checks["device mlx: hardware"]["verdict"] == "ok"


@pytest.mark.needs("no_torch")
def test_torch_and_the_other_implementations_are_not_installed_here() -> None:
    assert [name for name in FOREIGN if find_spec(name) is not None] == []


@pytest.mark.needs("no_torch")
def test_without_torch_doctor_says_that_no_installed_package_needs_it() -> None:
    ran = sglcore("doctor", "--json", environ={"SGLCORE_DEVICE": "mlx"})
    check = next(check for check in json.loads(ran.stdout)["checks"] if check["topic"] == "torch")
    assert (check["verdict"], check["remedy"]) == ("note", "")
    assert "no installed device package needs it" in check["found"]


@pytest.mark.needs("no_torch")
@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac needs no name")
def test_alone_on_linux_it_is_never_taken_unasked_and_the_error_says_how_to_ask() -> None:
    ran = sglcore("generate", "--prompt", PROMPT)
    assert ran.returncode == 2 and ran.stdout == ""
    assert "found no accelerator among mlx" in ran.stderr and "--device NAME" in ran.stderr
    assert sglcore("devices").returncode == 0


@pytest.mark.needs("no_torch")
def test_the_kit_says_that_its_reference_needs_torch() -> None:
    ran = sglcore("conform", "mlx", "--level", "C0")
    assert ran.returncode == 2
    assert "torch, which is not installed; pip install torch" in ran.stderr and "Traceback" not in ran.stderr
