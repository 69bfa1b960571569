"""The pinned virtual environment of the build tools, below `build/`: made when first needed, and
again when the pins or Python change."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.wheels.distributions import ROOT, ReleaseError

PINS = Path(__file__).with_name("requirements.txt")
FOLDER = ROOT / "build" / "release" / "tool"
UMASK = 0o022
"""The umask of builds, because wheels keep the permissions of their files."""
STAMP = "made-of"
"""The file in the folder with the installed pins; written last."""


def interpreter(folder: Path = FOLDER) -> Path:
    """Return the environment's Python; makes the environment if needed, then waits for downloads,
    and for another process that makes it. Raises ReleaseError."""
    python, stamp = folder / "bin" / "python", folder / STAMP
    wanted = f"{sys.version}\n{PINS.read_text(encoding='utf-8')}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            run((sys.executable, "-m", "venv", str(folder)))
            run((str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(PINS)))
            stamp.write_text(wanted, encoding="utf-8")
    return python


def run(command: Sequence[str], cwd: Path = ROOT, environ: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Waits; raises ReleaseError with its last lines if it
    fails."""
    ran = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False, umask=UMASK)
    if ran.returncode:
        last = " ".join((ran.stderr.strip() or ran.stdout.strip()).splitlines()[-3:])
        raise ReleaseError(f"{' '.join(map(str, command[:6]))} ended with {ran.returncode}: {last}")
    return ran.stdout
