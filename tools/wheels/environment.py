"""The environment of the tools that build: pinned, below `build/`, made when first needed and again
when the pins change."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.wheels.distributions import ROOT, ReleaseError

PINS = Path(__file__).with_name("requirements.txt")
FOLDER = ROOT / "build" / "release" / "tool"
UMASK = 0o022
"""Wheels keep the permissions of their files."""
STAMP = "made-of"
"""The file in the folder that says which pins were installed, written last."""


def interpreter(folder: Path = FOLDER) -> Path:
    """The environment's Python. Waits for downloads the first time; raises ReleaseError."""
    python, stamp = folder / "bin" / "python", folder / STAMP
    wanted = f"{sys.version}\n{PINS.read_text(encoding='utf-8')}"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        run((sys.executable, "-m", "venv", str(folder)))
        run((str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(PINS)))
        stamp.write_text(wanted, encoding="utf-8")
    return python


def run(command: Sequence[str], cwd: Path = ROOT, environ: Mapping[str, str] | None = None) -> str:
    """What a command printed; raises ReleaseError with its last words if it fails."""
    ran = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, umask=UMASK)
    if ran.returncode:
        last = " ".join((ran.stderr.strip() or ran.stdout.strip()).splitlines()[-3:])
        raise ReleaseError(f"{' '.join(map(str, command[:6]))} ended with {ran.returncode}: {last}")
    return ran.stdout
