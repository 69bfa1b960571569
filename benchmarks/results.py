"""Writes result files, and describes the machine and versions of a measurement."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path


def machine() -> dict[str, str]:
    """Return processor, Python, library versions and commit."""
    return {
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "sglcore": version("sglcore"),
        "commit": _commit(),
    }


def write_results(file: str, content: dict[str, object]) -> None:
    """Write one result file as indented JSON."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip()
