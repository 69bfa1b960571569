"""Libraries of native kernels for tests, built in `build/native` once for all processes of a run.

Each also contains the topic `probe` of this folder: kernels that only tests call.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ci.lanes import ROOT
from ci.selection import Selection
from devices.cpu.tests.native.far import FarLibrary
from sglcore_cpu.compile import SOURCES, BuildError, Variant, build, source_digest, topics
from sglcore_cpu.native import Library

FOLDER = ROOT / "build" / "native"
OBJECTS = FOLDER / "objects"
PROBE = Path(__file__).with_name("probe")
PLUGIN = "native-library"
KERNELS, PROGRAMS = "native-kernels", "native-programs"
"""Groups of tests (ci/groups.py): every kernel for every instruction set; tests that build their
own programs."""
KEPT_SECONDS = 24 * 3600
TINY = """#include "kernels.h"
#define SGL_TINY_ARGS(P, I, D) P(x)
SGL_ARGS(TinyArgs, SGL_TINY_ARGS)
namespace sgl::SGL_ISA {
static void tiny(const TinyArgs&, Pool&) {}
SGL_KERNELS(tiny, SGL_KERNEL("tiny", tiny, TinyArgs))
}
"""


@dataclass(frozen=True)
class GivenLibrary:
    """The pytest plugin of a run with its own library: the library, and the instruction sets and
    numbers of threads to test."""

    library: Library | FarLibrary
    names: tuple[str, ...]
    threads: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Place:
    """The folder of one state of the sources and its library, and the topics that compile."""

    folder: Path
    topics: tuple[str, ...]

    @property
    def sources(self) -> Path:
        """The copy of the sources."""
        return self.folder / "sources"

    @property
    def library(self) -> Path:
        """The library that was built from the copy."""
        return self.folder / "library.so"


def every_set(selection: Selection) -> Library:
    """Load a library with every topic. If the whole group runs, it has every instruction set of
    this architecture, by emulation where needed; otherwise it is a plain build, which reuses an
    installation's object files. Waits for minutes if it must be built."""
    return loaded(emulated() if KERNELS in selection.whole else prepared(Variant(), "plain").library)


def emulated() -> Path:
    """Build the library for this architecture, with the levels above avx512 emulated by avx512
    instructions. Waits for minutes."""
    return prepared(Variant(emulate=True), "emulated").library


def prepared(variant: Variant, word: str) -> Place:
    """Copy the current sources and build the copy, so that edits during the build do not mix with
    it. Waits for minutes.

    A topic that does not compile is left out; its tests report a missing kernel.
    """
    digest = hashlib.sha256((source_digest() + source_digest(PROBE)).encode()).hexdigest()[:16]
    place = FOLDER / f"{word}-{digest}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with locked(FOLDER / f"{word}.lock"):
        if not (place / "topics").exists():
            remove_old(FOLDER)
            shutil.copytree(SOURCES, place / "sources", dirs_exist_ok=True)
            shutil.copytree(PROBE, place / "sources" / PROBE.name, dirs_exist_ok=True)
            (place / "topics").write_text(" ".join(build_what_compiles(variant, place)))
    return Place(place, tuple((place / "topics").read_text().split()))


def build_what_compiles(variant: Variant, place: Path) -> tuple[str, ...]:
    """Build the library from the topics that compile; return those."""
    chosen = topics(place / "sources")
    try:
        build(place / "library.so", variant, OBJECTS, place / "sources")
    except BuildError as error:
        print(error)
        chosen = tuple(topic for topic in chosen if compiles(topic, variant, place))
        build(place / "library.so", replace(variant, topics=chosen), OBJECTS, place / "sources")
    return chosen


def compiles(topic: str, variant: Variant, place: Path) -> bool:
    """Return whether a library of one topic can be built."""
    try:
        build(place / f"{topic}.so", replace(variant, topics=(topic,)), OBJECTS, place / "sources")
    except BuildError as error:
        print(error)
        return False
    return True


def tiny_sources(folder: Path) -> Path:
    """Copy the sources that every library has, and add one topic with a kernel that does nothing;
    compiling them takes seconds."""
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns(*topics()))
    (folder / "tiny").mkdir()
    (folder / "tiny" / "tiny.cpp").write_text(TINY)
    return folder


def loaded(path: Path) -> Library:
    """Load a library that was built from the folder `sources` next to it."""
    return Library(path, path.parent / "sources")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file; other processes wait for it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_old(folder: Path) -> None:
    """Remove libraries and object files that are more than a day old."""
    for path in (*folder.glob("*-*"), *folder.glob("objects/*")):
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
