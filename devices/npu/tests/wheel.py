"""Runs the vendor's real torch_npu on a machine without CANN: unpacks its wheel, and makes stub
libraries in place of CANN's.

As a program (`python wheel.py MODULE ...`) it imports that torch_npu, calls the function `answer()
-> object` of each named module of this folder, and prints the results as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

VARIABLE = "TORCH_NPU_WHEEL"
STORED = Path(__file__).resolve().parents[3] / "build" / "wheels"


def find() -> Path | None:
    """Return the wheel that the variable names, or one below `build/wheels`; None if there is
    none."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else next(iter(sorted(STORED.glob("torch_npu-*.whl"))), None)


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack the wheel, and make stub libraries below `folder`; needs a C compiler and binutils.
    Waits."""
    import torch

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    own = [*folder.glob("torch_npu/lib/*.so"), *folder.glob("torch_npu/_C*.so")]
    theirs = list((Path(torch.__file__).parent / "lib").glob("*.so*"))
    here, known = {file.name for file in (*own, *theirs)}, installed()
    missing = {name for file in own for name in needed(file) if name not in here and name not in known}
    wanted = {name for file in own for name in symbols(file, "--undefined-only")}
    offered = {name for file in (*own, *theirs) for name in symbols(file, "--defined-only")}
    system = [Path(path) for path in linked(theirs[0])]
    offered |= {name for file in (*system, Path(sys.executable)) for name in symbols(file, "--defined-only")}
    names = sorted(name for name in wanted - offered if name.isidentifier() and not name.startswith(("_", "Py")))
    stubs = folder / "stubs"
    stubs.mkdir()
    source = stubs / "stubs.c"
    source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in names))
    for name in sorted(missing):
        command = ["gcc", "-w", "-shared", "-fPIC", "-o", str(stubs / name), f"-Wl,-soname,{name}", str(source)]
        subprocess.run(command, check=True)
    return folder


def symbols(file: Path, which: str) -> Iterable[str]:
    """Return the names in a library's dynamic symbol table, without versions."""
    text = subprocess.run(["nm", "-D", which, "-P", str(file)], capture_output=True, text=True, check=False).stdout
    return {line.split()[0].partition("@")[0] for line in text.splitlines()}


def needed(file: Path) -> list[str]:
    """Return the libraries that a library depends on."""
    text = subprocess.run(["readelf", "-d", str(file)], capture_output=True, text=True, check=True).stdout
    return [line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line]


def installed() -> str:
    """Return the loader's list of known libraries."""
    return subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout


def linked(file: Path) -> list[str]:
    """Return the paths at which the loader finds a library's dependencies."""
    text = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True).stdout
    return [part.split()[0] for line in text.splitlines() if "=> /" in line for part in [line.split("=> ")[1]]]


def ask(folder: Path, *modules: str) -> list[Any]:
    """Return the results of `answer()` of these modules, in a process that has imported the
    unpacked torch_npu. Waits. Raises RuntimeError."""
    paths = [str(folder), str(Path(__file__).parent), *filter(None, sys.path)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LD_LIBRARY_PATH": str(folder / "stubs")}
    environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [sys.executable, __file__, *modules]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"torch_npu could not be asked:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]

    print(json.dumps([importlib.import_module(module).answer() for module in sys.argv[1:]]))
