"""Makes the pip commands of an installation, in order."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.installer.choice import Choice

CONSTRAINTS = "constraints.txt"
TESTS = "constraints-tests.txt"
"""Versions for the tests' environment only: Triton's, for a torch that does not bring one."""
TEST = "test"
"""The extra that the tests' environment is installed with."""
BUILDER = "setuptools>=77"
"""The build requirement of every package of this checkout."""

Command = tuple[str, ...]


def pip(constraints: str) -> Command:
    """Return the beginning of all commands. `--no-compile`: Python compiles modules when they are
    imported; pip would compile all."""
    quiet = ("--progress-bar", "off", "--disable-pip-version-check", "--no-compile")
    return (sys.executable, "-m", "pip", "install", *quiet, "-c", constraints)


def in_order(
    root: Path, folders: Sequence[Path], extra: str, choice: Choice, system: str, has_triton: bool
) -> list[Command]:
    """Return all commands of an installation. `has_triton`: torch has brought Triton, or the
    vendor's is installed."""
    constraints = constraints_for(root, choice.number)
    torch = of_torch(choice, constraints)
    needs_triton = extra == TEST and system == "Linux" and not has_triton
    triton = of_triton(root, constraints) if needs_triton else ()
    return [*([torch] if torch else []), *triton, *of_checkout(root, folders, extra, constraints)]


def of_torch(choice: Choice, constraints: str) -> Command:
    """Return the command that installs torch alone, so that pip takes no other build; empty if the
    installed one stays."""
    return (*pip(constraints), *choice.index_words, *choice.requirements) if choice.requirements else ()


def of_triton(root: Path, constraints: str) -> tuple[Command, ...]:
    """Return the commands that install Triton for the tests."""
    return tuple((*pip(constraints), line) for line in pinned(root / TESTS))


def of_checkout(root: Path, folders: Sequence[Path], extra: str, constraints: str) -> tuple[Command, ...]:
    """Return the commands that install the build requirement once, then the core, then the other
    packages of this checkout in editable mode."""
    editable = (*pip(constraints), "--no-build-isolation", "-e")
    checkouts = tuple(word for folder in folders for word in ("-e", with_extra(root, folder, extra)))[1:]
    core = f".[{extra}]" if extra else "."
    return ((*pip(constraints), BUILDER), (*editable, core), (*editable, *checkouts))


def pinned(path: Path) -> list[str]:
    """Return the requirements in a file, without comments."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def with_extra(root: Path, folder: Path, extra: str) -> str:
    """Return a package's folder as pip's requirement, with the extra if the package declares it."""
    declared = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    offers = extra in declared.get("optional-dependencies", {})
    return f"{folder.relative_to(root)}[{extra}]" if offers else str(folder.relative_to(root))


def constraints_for(root: Path, number: str) -> str:
    """Return the constraints file for this torch: the checkout's own, or a copy below `build` with
    this version."""
    lines = (root / CONSTRAINTS).read_text().splitlines()
    if f"torch=={number}" in lines:
        return CONSTRAINTS
    path = root / "build" / f"constraints-torch-{number}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(f"torch=={number}" if line.startswith("torch==") else line for line in lines) + "\n")
    return str(path.relative_to(root))
