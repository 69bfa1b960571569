"""Build the native core once per sources, torch, Python, compiler and flags, in a cache that
several processes may share."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

NAME = "sglcore_sim_native"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")


def sources() -> tuple[Path, ...]:
    """Return the paths of the C++ files, then of the headers: next to the package in a checkout,
    inside the package in a wheel. Raises RuntimeError if there is no such folder."""
    here = Path(__file__).resolve().parent
    folder = next((f for f in (here / "csrc", here.parent / "csrc") if f.is_dir()), None)
    if folder is None:
        raise RuntimeError(f"found no csrc folder next to {here}; reinstall sglcore-sim")
    return tuple(sorted(folder.glob("*.cpp"))) + tuple(sorted(folder.glob("*.h")))


def cache_folder() -> Path:
    """Return the folder that `SGLSIM_CACHE` names, or one in the user's cache folder."""
    named = os.environ.get("SGLSIM_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglcore-sim"


def fingerprint() -> str:
    """Return a hash of everything that the binary depends on, 20 hexadecimal digits: sources,
    torch, Python, compiler and flags."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.name.encode() + path.read_bytes())
    for part in (torch.__version__, sys.version, compiler(), *FLAGS):
        digest.update(part.encode())
    return digest.hexdigest()[:20]


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def include_flags() -> list[str]:
    root = Path(torch.__file__).parent / "include"
    folders = (root, root / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"]))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [abi, *(flag for folder in folders for flag in ("-isystem", str(folder)))]


def compile_one(source: Path, target: Path) -> Path:
    language = ["-x", "c++-header"] if source.suffix == ".h" else []
    run([compiler(), *FLAGS, *include_flags(), *language, "-c", str(source), "-o", str(target)])
    return target


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"the native core of sglcore-sim does not compile: {' '.join(command[:1])} reported\n{done.stderr[-8000:]}"
        )


def compile_all(target: Path) -> None:
    """Compile with two processes at a time, link, and rename the result to `target`, so that no one
    sees half a file. Waits; raises RuntimeError with the compiler's message."""
    work = target.parent / "objects"
    work.mkdir(parents=True, exist_ok=True)
    files = [Path(shutil.copy(path, work)) for path in sources()]
    for header in (path for path in files if path.suffix == ".h"):
        compile_one(
            header, header.with_suffix(".h.gch")
        )  # precompiled once instead of in every file: torch's headers take most of the time
    cpp = sorted((path for path in files if path.suffix == ".cpp"), key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda path: compile_one(path, path.with_suffix(".o")), cpp))
    library = Path(torch.__file__).parent / "lib"
    partial = target.with_suffix(".partial")
    links = [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    run([compiler(), "-shared", *map(str, objects), "-o", str(partial), *links])
    partial.replace(target)
    shutil.rmtree(work)


def built() -> Path:
    """Return the path of the binary in the cache folder.

    Compile it if it is missing; wait if another process compiles it. Raises RuntimeError if it does
    not compile.
    """
    folder = cache_folder() / fingerprint()
    target = folder / (NAME + importlib.machinery.EXTENSION_SUFFIXES[0])
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            compile_all(target)
    return target


def load() -> ModuleType:
    """Load the native module and return it; compile it first if the cache has none, which takes
    less than a minute. Raises RuntimeError if it does not compile."""
    path = built()
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
