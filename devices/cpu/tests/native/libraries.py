"""Libraries of native kernels that tests build: below `build/native`, once for all processes of a
run.

Each holds the topic `probe` of this folder too: kernels that only tests call.
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
"""Groups of tests (ci/groups.py): every kernel for every instruction set; those that build programs
of their own."""
KEPT_SECONDS = 24 * 3600
TINY = """#include "kernels.h"
namespace sgl::SGL_ISA {
extern const KernelList tiny_kernels;
const KernelList tiny_kernels = {nullptr, 0};
}
"""


@dataclass(frozen=True)
class GivenLibrary:
    """The plugin by which a run of pytest brings its own library, and the instruction sets to run
    in it."""

    library: Library | FarLibrary
    names: tuple[str, ...]
    threads: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Place:
    """Where one state of the sources is kept and built, with the topics of it that compile."""

    folder: Path
    topics: tuple[str, ...]

    @property
    def sources(self) -> Path:
        """The copy."""
        return self.folder / "sources"

    @property
    def library(self) -> Path:
        """What was built from it."""
        return self.folder / "library.so"


def every_set(selection: Selection) -> Library:
    """Every topic for every instruction set of this kind of machine; in a sample, for those that
    this processor has, of compiled files that an installation has left. Waits, minutes where it
    must be built."""
    return loaded(emulated() if KERNELS in selection.whole else prepared(Variant(), "plain").library)


def emulated() -> Path:
    """The library for this kind of machine; what is above avx512 is emulated by its instructions.
    Waits, minutes."""
    return prepared(Variant(emulate=True), "emulated").library


def prepared(variant: Variant, word: str) -> Place:
    """The sources as they are now, copied and built: whoever edits them meanwhile, a build is of
    one state of them.

    A topic that does not compile is left out, and its tests say that a kernel is missing.
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
    """Build the library; the topics that are in it."""
    chosen = topics(place / "sources")
    try:
        build(place / "library.so", variant, OBJECTS, place / "sources")
    except BuildError as error:
        print(error)
        chosen = tuple(topic for topic in chosen if compiles(topic, variant, place))
        build(place / "library.so", replace(variant, topics=chosen), OBJECTS, place / "sources")
    return chosen


def compiles(topic: str, variant: Variant, place: Path) -> bool:
    """Whether one topic can be built alone."""
    try:
        build(place / f"{topic}.so", replace(variant, topics=(topic,)), OBJECTS, place / "sources")
    except BuildError as error:
        print(error)
        return False
    return True


def tiny_sources(folder: Path) -> Path:
    """The parts that every library has, and one topic without a kernel: what takes a compiler
    seconds."""
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns(*topics()))
    (folder / "tiny").mkdir()
    (folder / "tiny" / "tiny.cpp").write_text(TINY)
    return folder


def loaded(path: Path) -> Library:
    """A library that was built from the copy beside it."""
    return Library(path, path.parent / "sources")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the others wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_old(folder: Path) -> None:
    """Libraries and compiled files of more than a day ago."""
    for path in (*folder.glob("*-*"), *folder.glob("objects/*")):
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
