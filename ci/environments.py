"""Virtual environments of lanes that declare their own: only the declared packages are installed,
with folders of this checkout in place.

An environment lies below `build/environments` and is made again only when its digest (interpreter,
requirements, pins, pyproject.toml files) has changed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from ci.lanes import ROOT, Lane

FOLDER = Path("build") / "environments"
CONSTRAINTS = "constraints.txt"
STAMP = "made-of"
"""The file in an environment that holds its digest; written last."""
SUITE = ("pytest", "pytest-xdist", "hypothesis", "coverage")
"""Packages for running and watching tests, installed in every environment."""


def folder_of(lane: Lane, root: Path = ROOT) -> Path:
    """Return the folder of a lane's environment."""
    return root / FOLDER / lane.name


def python_of(lane: Lane, root: Path = ROOT) -> Path:
    """Return the interpreter of a lane: this one, or its environment's."""
    return folder_of(lane, root) / "bin" / "python" if lane.environment else Path(sys.executable)


def prepare(lane: Lane, root: Path = ROOT) -> bool:
    """Make the environment of a lane if the lane declares one and it is missing or outdated; waits.
    Returns whether it was made.

    Raises CalledProcessError when pip can not install the declared packages.
    """
    if not lane.environment:
        return False
    folder, made_of = folder_of(lane, root), digest(lane, root)
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text() == made_of:
        return False
    print(f"making {folder.relative_to(root)}: {', '.join(lane.environment)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    (folder / CONSTRAINTS).write_text(pins(lane, root))
    subprocess.run(pip_command(lane, root), cwd=root, check=True)
    stamp.write_text(made_of)
    return True


def pip_command(lane: Lane, root: Path = ROOT) -> tuple[str, ...]:
    """Return the command with which this interpreter's pip installs into the environment: folders
    of the checkout in editable mode, everything at pinned versions. `--no-compile`: imports compile
    what they need, pip would compile all."""
    words = tuple(
        part for word in (*lane.environment, *SUITE) for part in (("-e", word) if is_checkout(word, root) else (word,))
    )
    pip = (sys.executable, "-m", "pip", "--python", str(python_of(lane, root)), "install", "--quiet")
    where = str(folder_of(lane, root) / CONSTRAINTS)
    return (*pip, "--disable-pip-version-check", "--no-compile", "-c", where, *torch_words(lane, root), *words)


def torch_words(lane: Lane, root: Path = ROOT) -> tuple[str, ...]:
    """Return pip's arguments for torch's CPU build, chosen by the installer; waits for the index.
    Empty if no folder in the environment requires torch."""
    from tools.installer.choice import Wanted, choose
    from tools.installer.needs import needs_of
    from tools.installer.sources import asker, configured, this_machine

    folders = (root / word for word in lane.environment if is_checkout(word, root))
    needs = [found for folder in folders if (found := needs_of(folder)) is not None]
    if not needs:
        return ()
    version = next((line[7:].strip() for line in pins(lane, root).splitlines() if line.startswith("torch==")), "")
    wanted = Wanted(
        host=needs[0],
        devices=(),
        reason=f"the environment of {lane.name} requests it",
        machine=this_machine(),
        version=version,
        only_processor=True,
    )
    sources = configured()
    choice = choose(wanted, None, sources, asker(sources))
    print(choice.why, flush=True)
    return (*choice.index_words, *choice.requirements)


def pins(lane: Lane, root: Path = ROOT) -> str:
    """Return the lines of constraints.txt without the lane's `unpinned` packages."""
    lines = (root / CONSTRAINTS).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0].strip() not in lane.unpinned)


def is_checkout(word: str, root: Path) -> bool:
    """Return whether a requirement is a folder of the checkout."""
    return (root / word / "pyproject.toml").is_file()


def digest(lane: Lane, root: Path = ROOT) -> str:
    """Return the SHA-256 (64 hex digits) of an environment's inputs: interpreter, requirements,
    pins, and the pyproject.toml of its folders."""
    folders = (root / word / "pyproject.toml" for word in lane.environment if is_checkout(word, root))
    declared = (file.read_text() for file in folders if file.is_file())
    parts = (sys.version, sys.base_prefix, *lane.environment, *SUITE, pins(lane, root), *declared)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
