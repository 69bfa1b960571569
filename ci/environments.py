"""Environments of lanes that declare their own: what they name is installed there from this
checkout, and nothing else.

An environment lies below `build/environments` and is made again only when what it was made of has
changed.
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
"""The file in an environment with the digest of what it was made of; the last to be written."""
SUITE = ("pytest", "pytest-xdist", "hypothesis", "coverage")
"""What runs the tests and watches them, in every environment."""


def folder_of(lane: Lane, root: Path = ROOT) -> Path:
    """Where the environment of a lane lies."""
    return root / FOLDER / lane.name


def python_of(lane: Lane, root: Path = ROOT) -> Path:
    """The interpreter that runs a lane: this one, or that of its own environment."""
    return folder_of(lane, root) / "bin" / "python" if lane.environment else Path(sys.executable)


def prepare(lane: Lane, root: Path = ROOT) -> bool:
    """Make the environment of a lane if it has one and it is not there as declared; waits. True: it
    was made now.

    Raises CalledProcessError when pip can not install what is declared.
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
    """How this interpreter's pip installs into it: folders of the checkout in place, everything at
    the pinned versions. What is imported is compiled then; pip would compile everything."""
    words = tuple(
        part for word in (*lane.environment, *SUITE) for part in (("-e", word) if is_checkout(word, root) else (word,))
    )
    pip = (sys.executable, "-m", "pip", "--python", str(python_of(lane, root)), "install", "--quiet")
    where = str(folder_of(lane, root) / CONSTRAINTS)
    return (*pip, "--disable-pip-version-check", "--no-compile", "-c", where, *torch_words(lane, root), *words)


def torch_words(lane: Lane, root: Path = ROOT) -> tuple[str, ...]:
    """What pip is told so that it takes torch's processor build, as the installer chooses that;
    waits for its index. Nothing in an environment of which no folder asks for torch."""
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
        reason=f"the environment of {lane.name} asks for it",
        machine=this_machine(),
        version=version,
        only_processor=True,
    )
    sources = configured()
    choice = choose(wanted, None, sources, asker(sources))
    print(choice.why, flush=True)
    return (*choice.index_words, *choice.requirements)


def pins(lane: Lane, root: Path = ROOT) -> str:
    """The pinned versions that hold in it."""
    lines = (root / CONSTRAINTS).read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.partition("==")[0].strip() not in lane.unpinned)


def is_checkout(word: str, root: Path) -> bool:
    """A requirement that is a folder of the checkout."""
    return (root / word / "pyproject.toml").is_file()


def digest(lane: Lane, root: Path = ROOT) -> str:
    """What an environment is made of, in 64 letters: interpreter, requirements, pins, and the
    declarations of folders."""
    folders = (root / word / "pyproject.toml" for word in lane.environment if is_checkout(word, root))
    declared = (file.read_text() for file in folders if file.is_file())
    parts = (sys.version, sys.base_prefix, *lane.environment, *SUITE, pins(lane, root), *declared)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
