"""Imports modules in a fresh interpreter and reports the modules loaded, the device nodes opened
and the CPU time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_WATCH = """
import os, sys, time, importlib, json
opened = []
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        name = args[0] if isinstance(args[0], str) else args[0].decode(errors="replace")
        if name.startswith("/dev/"):
            opened.append(name)
sys.addaudithook(hook)
sys.path[:0] = sys.argv[1].split(os.pathsep)
start = time.process_time()
for name in sys.argv[2:]:
    importlib.import_module(name)
seconds = time.process_time() - start
print(json.dumps({"modules": sorted(sys.modules), "opened": opened, "seconds": seconds}))
"""


@dataclass(frozen=True, slots=True)
class Imported:
    """What a fresh interpreter did while it imported some modules. `seconds` is CPU time, so the
    load of other processes does not lengthen it."""

    modules: frozenset[str]
    opened: tuple[str, ...]
    seconds: float


def imported(root: Path, modules: Sequence[str], beside: Sequence[Path] = ()) -> Imported:
    """Import modules of the tree at `root`, and of the folders in `beside`, in a new process.
    Raises AssertionError if an import fails."""
    path = os.pathsep.join(map(str, (root, *beside)))
    command = (sys.executable, "-I", "-c", _WATCH, path, *modules)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if ran.returncode != 0:
        raise AssertionError(f"importing {', '.join(modules)} failed:\n{ran.stderr}")
    values = json.loads(ran.stdout)
    return Imported(frozenset(values["modules"]), tuple(values["opened"]), values["seconds"])


def modules_of(root: Path, package: str) -> tuple[str, ...]:
    """Return the names of all modules of a package except `__main__`, from its files."""
    folder = root.joinpath(*package.split("."))
    names = (path.relative_to(root).with_suffix("").parts for path in sorted(folder.rglob("*.py")))
    return tuple(
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names if "__main__" not in parts
    )
