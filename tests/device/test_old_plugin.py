"""A package written for the contract one number lower goes on working, from its probe to its graphs, unchanged."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from sglcore.device.package import API

FOLDER = Path(__file__).with_name("old_plugin")
DIGEST = "5f625660a30d0d025d4ad63f2568b85f84fb540ee8422d8494ea71b08af5f372"
"""Of the frozen files. It never changes: when the contract moves on, the folder of a newer number is added."""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SGLCORE_")}
    return subprocess.run(
        (sys.executable, "-m", "sglcore.cli", *words),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**clean, "PYTHONPATH": str(FOLDER), "COLUMNS": "200"},
    )


def digest(folder: Path) -> str:
    """Over names and contents of the files, in order."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def test_the_plugin_is_as_it_was_written() -> None:
    assert digest(FOLDER) == DIGEST


def test_it_is_for_the_number_before_this_one() -> None:
    entry = (FOLDER / "sglcore_old-1.0.dist-info" / "entry_points.txt").read_text()
    assert f"[api-{API - 1}]" in entry


def test_its_probe_is_called_as_it_was_written() -> None:
    seen = run("devices", "old")
    assert seen.returncode == 0, seen.stderr
    assert "always there" in seen.stdout


def test_it_generates_eagerly_and_with_its_graphs() -> None:
    words = ("generate", "--device", "old", "--max-tokens", "8", "--prompt", "Once upon", "--graph")
    eager, again = run(*words, "off"), run(*words, "again")
    assert "on old (sglcore-old 1.0)" in eager.stderr, eager.stderr
    assert eager.stdout.startswith("Once upon") and len(eager.stdout) > len("Once upon a")
    assert again.stdout == eager.stdout
    assert "decode at batch sizes" in again.stderr
