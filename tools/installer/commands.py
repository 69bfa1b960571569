"""The pip commands of an installation, in order, as words."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.installer.choice import Choice

CONSTRAINTS = "constraints.txt"
TESTS = "constraints-tests.txt"
"""Versions that hold in the tests' environment alone, where nothing asks for others: Triton's,
beside a torch that brings none."""
TEST = "test"
"""The extra with which the tests' environment is installed."""
BUILDER = "setuptools>=77"
"""What every package of this checkout is built with."""

Command = tuple[str, ...]


def pip(constraints: str) -> Command:
    """How all begin. Python compiles what is imported when it is: pip would compile everything."""
    quiet = ("--progress-bar", "off", "--disable-pip-version-check", "--no-compile")
    return (sys.executable, "-m", "pip", "install", *quiet, "-c", constraints)


def in_order(
    root: Path, folders: Sequence[Path], extra: str, choice: Choice, system: str, has_triton: bool
) -> list[Command]:
    """All of an installation. `has_triton`: torch has brought one, or the vendor's is there."""
    constraints = constraints_for(root, choice.number)
    torch = of_torch(choice, constraints)
    needs_triton = extra == TEST and system == "Linux" and not has_triton
    triton = of_triton(root, constraints) if needs_triton else ()
    return [*([torch] if torch else []), *triton, *of_checkout(root, folders, extra, constraints)]


def of_torch(choice: Choice, constraints: str) -> Command:
    """Torch on its own, so that pip takes no other; empty where the one that is there stays."""
    return (*pip(constraints), *choice.index_words, *choice.requirements) if choice.requirements else ()


def of_triton(root: Path, constraints: str) -> tuple[Command, ...]:
    """The tests' own Triton."""
    return tuple((*pip(constraints), line) for line in pinned(root / TESTS))


def of_checkout(root: Path, folders: Sequence[Path], extra: str, constraints: str) -> tuple[Command, ...]:
    """What builds packages, once for all of them; then the core and the packages from this
    checkout."""
    editable = (*pip(constraints), "--no-build-isolation", "-e")
    checkouts = tuple(word for folder in folders for word in ("-e", with_extra(root, folder, extra)))[1:]
    core = f".[{extra}]" if extra else "."
    return ((*pip(constraints), BUILDER), (*editable, core), (*editable, *checkouts))


def pinned(path: Path) -> list[str]:
    """The requirements of a file, without its comments."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def with_extra(root: Path, folder: Path, extra: str) -> str:
    """A package's folder as pip takes it, with an extra if it declares that."""
    declared = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    offers = extra in declared.get("optional-dependencies", {})
    return f"{folder.relative_to(root)}[{extra}]" if offers else str(folder.relative_to(root))


def constraints_for(root: Path, number: str) -> str:
    """The file of constraints with this torch: the checkout's own, or one below `build` with
    another version."""
    lines = (root / CONSTRAINTS).read_text().splitlines()
    if f"torch=={number}" in lines:
        return CONSTRAINTS
    path = root / "build" / f"constraints-torch-{number}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(f"torch=={number}" if line.startswith("torch==") else line for line in lines) + "\n")
    return str(path.relative_to(root))
