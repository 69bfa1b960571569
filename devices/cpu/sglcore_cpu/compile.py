"""Build the native library: the kernels of every topic, compiled once for each instruction set, and
one C interface to all of them.

It runs when the package is installed, at the first start of an installation without a library, and
by hand as `python -m sglcore_cpu.compile`. It imports the standard library only, because an
installer has neither this package nor its dependencies.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "native"
LIBRARY = "libsglcore_cpu.so"
PROCESSOR = "processor.cpp"
PLAIN = ("api.cpp", "pool.cpp", PROCESSOR)
"""Sources that are compiled once. Each folder of sources is a topic, compiled once for each
instruction set."""

KERNELS = re.compile(r"^SGL_KERNELS\((\w+),", re.MULTILINE)
"""Finds the names of the lists of kernels in a source file."""

HERE, ALL, NONE = "here", "all", "none"
SETTING = "SGLCORE_CPU_BUILD"
"""Environment variable that selects what an installation compiles: `here` (the default: the
instruction sets that this processor needs), `all` of this architecture, or `none` (the first start
compiles)."""
SECONDS_PER_SET = 95
"""Time to compile one instruction set on one core of 2 GHz, measured on a Xeon with g++ 12."""
LONGEST_SECONDS = 900
"""Timeout of one compiler call; the slowest file takes 20 seconds."""

COMMON = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
EMULATED = (*AVX512, "-DSGL_EMULATE", "-O1")
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize=nonnull-attribute",  # copying 0 bytes from a null pointer is allowed
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g1",
    "-O1",
)


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set: `name`, as `--kernels` takes it; `level`, its number in `isa.h`, where a
    higher level includes the lower ones; `flags`, the compiler flags it needs."""

    name: str
    level: int
    flags: tuple[str, ...]


X86 = (
    InstructionSet("avx2", 2, AVX2),
    InstructionSet("avx512", 3, AVX512),
    InstructionSet("avx512_vnni", 4, (*AVX512, "-mavx512vnni")),
    InstructionSet("avx512_bf16", 5, (*AVX512, "-mavx512vnni", "-mavx512bf16")),
    InstructionSet("amx", 6, (*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
)
ARM = (InstructionSet("neon", 1, ("-march=armv8.2-a+bf16+i8mm+dotprod+fp16",)),)


@dataclass(frozen=True, slots=True)
class Variant:
    """What to build. `compiler`: its command. `machine`: the architecture, as `platform.machine`
    names it. `emulate`: build the levels above avx512 with avx512 instructions only. `sanitize`:
    with the address and undefined-behaviour sanitizers. `topics`, `names`: only these topics and
    instruction sets (empty: all)."""

    compiler: str = "c++"
    machine: str = field(default_factory=platform.machine)
    emulate: bool = False
    sanitize: bool = False
    topics: tuple[str, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def instruction_sets(self) -> tuple[InstructionSet, ...]:
        """The selected instruction sets of `machine`, lowest level first; empty for an unknown
        machine."""
        every = {"x86_64": X86, "AMD64": X86, "aarch64": ARM, "arm64": ARM}.get(self.machine, ())
        sets = tuple(one for one in every if not self.names or one.name in self.names)
        if not self.emulate:
            return sets
        return tuple(InstructionSet(s.name, s.level, EMULATED) if s.level > 3 else s for s in sets)

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags of every file, without those of an instruction set."""
        return (*COMMON, "-O3", *(SANITIZE if self.sanitize else ()))


class BuildError(RuntimeError):
    """The compiler is missing, fails or does not end, or what was requested can not be built; the
    text says which, in one line."""


class NoCompiler(BuildError):
    """No command of the compiler's name is on the PATH."""


def topics(sources: Path = SOURCES) -> tuple[str, ...]:
    """Return the names of the folders in `sources` that contain .cpp files, sorted. Each is a
    topic: a folder of kernels that is compiled once for each instruction set."""
    return tuple(sorted(folder.name for folder in sources.iterdir() if any(folder.glob("*.cpp"))))


def source_digest(sources: Path = SOURCES) -> str:
    """Return a fingerprint of all C++ sources and headers, their paths included: 16 hexadecimal
    digits. The library contains it too, so that a library of other sources is noticed."""
    total = hashlib.sha256()
    for path in sorted(path for path in sources.rglob("*") if path.suffix in (".cpp", ".h")):
        total.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def build(target: Path, variant: Variant = Variant(), cache: Path | None = None, sources: Path = SOURCES) -> Path:
    """Compile and link the library to `target`; return `target`. Waits for minutes, unless `cache`
    has the parts: that folder keeps object files by a hash of their preprocessed source and flags,
    and libraries by a hash of all inputs (None: nothing is kept). Instruction sets that the
    compiler does not know are left out (`understood`). Raises `BuildError`, also if files can not
    be written."""
    variant = understood(variant)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            kept = (cache or Path(scratch)) / f"{_identity(variant, sources)}.so"
            kept.parent.mkdir(parents=True, exist_ok=True)
            if not kept.exists():
                _link(kept, variant, _objects(variant, kept.parent, Path(scratch), sources))
            _place(kept, target)
    except OSError as error:
        raise BuildError(f"the native library cannot be written: {error}") from None
    return target


def as_asked(variant: Variant, asked: str, sources: Path = SOURCES) -> Variant:
    """Return the variant with the instruction sets that `asked` selects: `here`, `all`, or names
    separated by commas (`none` is not accepted). `here` runs the compiler and selects as
    `for_this_processor` does. Raises `BuildError` for an unknown name; with `here` also as
    `for_this_processor` does."""
    if asked == HERE:
        return for_this_processor(variant, sources)
    known = {one.name for one in variant.instruction_sets}
    names = () if asked == ALL else tuple(name.strip() for name in asked.split(","))
    if known and not known.issuperset(names):
        raise BuildError(
            f"found {SETTING}={asked}; wanted {HERE}, {ALL}, {NONE}, or some of {', '.join(sorted(known))}"
        )
    return replace(variant, names=names)


def for_this_processor(variant: Variant, sources: Path = SOURCES) -> Variant:
    """Return the variant with the lowest and the highest instruction set that this processor
    announces and the compiler knows: the highest serves here, the lowest on most machines that the
    installation may be moved to. When `variant` is for another architecture, all that the compiler
    knows. Runs the compiler. Raises `BuildError` as `understood` does, and if the processor
    announces none."""
    variant = understood(variant)
    if variant.machine != platform.machine():
        return variant
    level = _processor_level(variant, sources)
    announced = [one.name for one in variant.instruction_sets if one.level <= level]
    if not announced:
        every = ", ".join(one.name for one in variant.instruction_sets)
        raise BuildError(f"this processor has none of the instruction sets that kernels are written for: {every}")
    return replace(variant, names=tuple(dict.fromkeys((announced[0], announced[-1]))))


def _processor_level(variant: Variant, sources: Path) -> int:
    """Return the level of this processor, as the library would detect it, by compiling and running
    a program of the same source; the highest level of the variant if the program can not be run.
    Raises `BuildError` if it does not compile."""
    most = max(one.level for one in variant.instruction_sets)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            main, program = Path(scratch) / "main.cpp", Path(scratch) / "level"
            main.write_text('#include "processor.h"\nint main() { return sgl::processor_level(); }\n', encoding="utf-8")
            files = (str(main), str(sources / PROCESSOR))
            _run((variant.compiler, *COMMON, f"-I{sources}", *files, "-o", str(program)))
            level = subprocess.run((str(program),), check=False, timeout=LONGEST_SECONDS).returncode
    except (OSError, subprocess.TimeoutExpired):
        return most
    return level if level >= 0 else most


def understood(variant: Variant) -> Variant:
    """Return the variant without the instruction sets that need flags unknown to the compiler,
    which is run once for each. Raises `BuildError` if none is left, if there is no compiler
    (`NoCompiler`), or if there are no kernels for the machine."""
    if shutil.which(variant.compiler) is None:
        raise NoCompiler(f"there is no C++ compiler {variant.compiler!r} here")
    if not variant.instruction_sets:
        raise BuildError(f"there are no kernels for the machine {variant.machine!r}")
    names = tuple(one.name for one in variant.instruction_sets if _takes(variant.compiler, one.flags))
    if not names:
        raise BuildError(f"{variant.compiler} knows none of the instruction sets that kernels are written for")
    return replace(variant, names=names)


def _takes(compiler: str, flags: Sequence[str]) -> bool:
    command = (compiler, *flags, "-x", "c++", "-E", os.devnull)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def compiler_version(compiler: str) -> str:
    """Return the compiler's output for `--version`, all lines. Raises `BuildError`."""
    return _run((compiler, "--version"))


def _identity(variant: Variant, sources: Path) -> str:
    """Return a fingerprint of everything that determines the library (sources, compiler version,
    variant, flags): 24 hexadecimal digits."""
    sets = [(one.name, one.level, one.flags) for one in variant.instruction_sets]
    parts = (source_digest(sources), compiler_version(variant.compiler), variant, variant.flags, sets)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _objects(variant: Variant, folder: Path, scratch: Path, sources: Path) -> list[Path]:
    """Compile every source in parallel and return the paths of the object files in `folder`; object
    files that it already has are reused. `scratch` takes the generated source. Raises
    `BuildError`."""
    registry = scratch / "registry.cpp"
    registry.write_text(registry_text(variant, sources), encoding="utf-8")
    jobs: list[tuple[Path, tuple[str, ...]]] = [(path, ()) for path in (*(sources / name for name in PLAIN), registry)]
    jobs += [job for one in variant.instruction_sets for job in _topic_jobs(one, variant, sources)]
    with ThreadPoolExecutor(cores()) as threads:
        return list(threads.map(lambda job: _compile(job[0], job[1], variant, folder, sources), jobs))


def _link(target: Path, variant: Variant, objects: Sequence[Path]) -> None:
    whole = ("-Wl,-z,defs",) if sys.platform == "linux" else ()  # elsewhere a missing symbol is an error anyway
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    _run((variant.compiler, *variant.flags, *whole, "-shared", "-pthread", "-o", str(fresh), *map(str, objects)))
    fresh.replace(target)


def _place(library: Path, target: Path) -> None:
    """Copy the library to `target` by renaming, so that no reader sees half a file; a process that
    has loaded the old file keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copy(library, fresh)
    fresh.replace(target)


def cores() -> int:
    """Return the number of parallel compilers: one for each usable core, at most 8 to limit their
    memory."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(usable, 8)


def kernel_lists(topic: str, sources: Path = SOURCES) -> tuple[str, ...]:
    """Return the names of the lists of kernels in a topic's .cpp files, as the macro `SGL_KERNELS`
    of kernels.h names them. Raises `BuildError` if there is none."""
    texts = (path.read_text(encoding="utf-8") for path in sorted((sources / topic).glob("*.cpp")))
    found = tuple(name for text in texts for name in KERNELS.findall(text))
    if not found:
        raise BuildError(f"no file of {sources / topic} offers kernels; wanted SGL_KERNELS (see kernels.h) at its end")
    return found


def registry_text(variant: Variant, sources: Path = SOURCES) -> str:
    """Return C++ source with four constants that the library reads: the instruction sets with their
    lists of kernels, their number, the digest of the sources, and whether instructions are
    emulated. Raises `BuildError` for a topic without kernels, and for two lists of one name."""
    chosen = [name for topic in variant.topics or topics(sources) for name in kernel_lists(topic, sources)]
    if twice := sorted({name for name in chosen if chosen.count(name) > 1}):
        raise BuildError(f"two files of the native sources name their list of kernels {', '.join(twice)}")
    lines = ['#include "library.h"']
    for one in variant.instruction_sets:
        declared = " ".join(f"extern const KernelList {name}_kernels;" for name in chosen)
        lines.append(f"namespace sgl::{one.name} {{ {declared} }}")
    lines.append("namespace sgl {")
    for one in variant.instruction_sets:
        listed = ", ".join(f"&{one.name}::{name}_kernels" for name in chosen)
        lines.append(f"static const KernelList* const {one.name}_lists[] = {{{listed}}};")
    sets = ", ".join(f'{{"{s.name}", {s.level}, {s.name}_lists, {len(chosen)}}}' for s in variant.instruction_sets)
    lines.append(f"const InstructionSet kInstructionSets[] = {{{sets}}};")
    lines.append(f"const int kNumInstructionSets = {len(variant.instruction_sets)};")
    lines.append(f'const char* const kSourceDigest = "{source_digest(sources)}";')
    lines.append(f"const bool kEmulates = {'true' if variant.emulate else 'false'};")
    return "\n".join([*lines, "}", ""])


def _topic_jobs(one: InstructionSet, variant: Variant, sources: Path) -> list[tuple[Path, tuple[str, ...]]]:
    flags = (*one.flags, f"-DSGL_ISA={one.name}", f"-DSGL_LEVEL={one.level}")
    chosen = variant.topics or topics(sources)
    return [(path, flags) for topic in chosen for path in sorted((sources / topic).glob("*.cpp"))]


def _compile(path: Path, flags: Sequence[str], variant: Variant, folder: Path, sources: Path) -> Path:
    """Return the path in `folder` of the object file of one source; compile it unless the folder
    has it. The name is a hash of command and preprocessed source, so the preprocessor runs each
    time. `flags`: those of the instruction set. Raises `BuildError`."""
    plain = (variant.compiler, *variant.flags, *flags)
    command = (*plain, f"-I{sources}")
    preprocessed = _run((*command, "-E", "-P", str(path)))
    name = hashlib.sha256("\0".join((*plain, preprocessed)).encode()).hexdigest()[:24]
    target = folder / f"{name}.o"
    if not target.exists():
        fresh = folder / f"{name}.{os.getpid()}.o"
        _run((*command, "-c", str(path), "-o", str(fresh)))
        fresh.replace(target)
    return target


def _run(command: Sequence[str]) -> str:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} did not end within {LONGEST_SECONDS} seconds: {' '.join(command)}") from None
    if ran.returncode:
        said = ran.stderr.splitlines()
        lines = [line for line in said if "error" in line or "undefined reference" in line] or said
        raise BuildError(f"{command[0]} failed: {' '.join(lines[:3]) or f'exit status {ran.returncode}'}")
    if ran.stderr.strip():
        print(ran.stderr.strip(), file=sys.stderr)
    return ran.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Build one variant as the command line asks, and print the path of the library; return 0. On
    failure print the compiler's message to stderr and return 1. `arguments`: None takes those of
    the process. With `--sets none` it builds nothing."""
    parser = argparse.ArgumentParser(prog="sglcore_cpu.compile", description="Build the native kernels.")
    parser.add_argument("--out", type=Path, default=SOURCES.parent / LIBRARY)
    parser.add_argument("--compiler", default=os.environ.get("CXX", "c++"))
    parser.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64, for a cross compiler")
    parser.add_argument("--emulate", action="store_true", help="build the sets above avx512 from avx512 instructions")
    parser.add_argument("--sanitize", action="store_true", help="with the address and undefined-behaviour sanitizers")
    parser.add_argument("--topics", nargs="*", default=(), help="some folders of kernels only")
    words = f"{HERE} (the lowest and the highest that this processor has), {ALL}, {NONE}, or names separated by commas"
    parser.add_argument("--sets", help=f"instruction sets: {words}; else {SETTING}, else {HERE}, or {ALL} if emulated")
    parser.add_argument("--cache", type=Path, default=None, help="a folder for compiled files")
    asked = parser.parse_args(arguments)
    variant = Variant(asked.compiler, asked.machine, asked.emulate, asked.sanitize, tuple(asked.topics))
    sets = asked.sets or (ALL if asked.emulate else os.environ.get(SETTING) or HERE)
    try:
        if sets != NONE:
            print(build(asked.out, as_asked(variant, sets), asked.cache))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
