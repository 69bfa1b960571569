"""Find the native library of an installation: the one next to this package, else one that the first
start compiles.

A wheel for this platform contains the library with every instruction set; an installation from
sources has compiled it. If neither is the case (a wheel without the library, a compiler that was
installed later), the library is compiled once into the user's cache.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglcore_cpu.compile import (
    HERE,
    LIBRARY,
    SECONDS_PER_SET,
    SOURCES,
    BuildError,
    NoCompiler,
    Variant,
    as_asked,
    build,
    cores,
    source_digest,
)
from sglcore_cpu.native import Library, NativeUnavailable

BESIDE = SOURCES.parent / LIBRARY
OBJECTS = "objects"
ROOM = "free some space, or set XDG_CACHE_HOME and TMPDIR"
REMEDY = "install one (g++, or CXX=PATH), and the next start compiles them"


def find_library(
    beside: Path = BESIDE, cache: Path | None = None, compiler: str | None = None, sources: Path = SOURCES
) -> Library:
    """Return the library next to the package, else the one in `cache` (None: the user's folder).

    If the cache has none, compile it: this waits minutes, and one printed line says so. Raises
    `NativeUnavailable` with a text of one line if the library that was found is damaged or built
    from other sources, or if there is none and none can be compiled.
    """
    if beside.exists():
        return Library(beside, sources)
    library = (cache or cache_folder()) / f"{source_digest(sources)}-{platform.machine()}" / LIBRARY
    if not library.exists():
        try:
            _compile(library, Variant(compiler or os.environ.get("CXX", "c++")), sources)
        except OSError as error:
            raise NativeUnavailable(f"the native kernels cannot be stored: {error}; set XDG_CACHE_HOME") from None
    return Library(library, sources)


def cache_folder() -> Path:
    """Return `sglcore-cpu` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`); it need
    not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglcore-cpu"


def _compile(library: Path, variant: Variant, sources: Path) -> None:
    """Compile the library for this processor, unless another process has done so meanwhile; waits
    for that process, or for the compiler. Object files of an interrupted or failed start are kept,
    and the next start reuses them. Raises NativeUnavailable if it can not be compiled, OSError if
    the folder can not be written."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with _alone(library.parent / "lock"):
        if library.exists():
            return
        try:
            chosen = as_asked(variant, HERE, sources)
            _announce(chosen, library)
            build(library, chosen, library.parent / OBJECTS, sources)
        except BuildError as error:
            remedy = f"; {REMEDY}" if isinstance(error, NoCompiler) else ""
            if isinstance(error.__context__, OSError):  # the disk failed, not the compiler
                remedy = f"; {ROOM}"
            raise NativeUnavailable(f"the native kernels are not compiled: {error}{remedy}") from None
        shutil.rmtree(library.parent / OBJECTS, ignore_errors=True)


def _announce(variant: Variant, library: Path) -> None:
    names = [one.name for one in variant.instruction_sets]
    minutes = -(-len(names) * SECONDS_PER_SET // (60 * cores()))
    print(
        f"sglcore-cpu: this installation has no compiled kernels; compiling them for {' and '.join(names)}, once, "
        f"about {minutes} min, into {library.parent}",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file in a `with` block; other processes wait for it. On Windows
    nothing is locked."""
    if sys.platform == "win32":  # no flock: two processes may compile the same library twice
        yield
        return
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
