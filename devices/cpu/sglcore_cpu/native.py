"""The native library: found, checked and called. Nothing here knows a kernel; each names itself and
its arguments.

A kernel's arguments are words of eight bytes in the order of its layout: addresses, integers,
doubles.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from sglcore_cpu.compile import LIBRARY, SOURCES, source_digest

_CODES: Mapping[str, str] = MappingProxyType({"P": "Q", "I": "q", "D": "d"})
TYPES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1})
"""The element types that kernels compute in, as their arguments name them."""


class NativeUnavailable(RuntimeError):
    """The native kernels can not run here; the text says why, with the remedy."""


class Recorder(Protocol):
    """What takes every kernel call while a step is captured; none of them runs."""

    def add(self, engine: Engine, kernel: int, arguments: bytes) -> None:
        """Keep a call."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result, whose address stays the step's own."""
        ...

    def kernel(self, name: str) -> BoundKernel | None:
        """One of the engine whose kernels the step calls; None before it has called one."""
        ...

    def host(self, function: Callable[..., object], *arguments: object) -> None:
        """Keep a call of Python that is no operation of torch, at its place among the others; its
        result is dropped."""
        ...


recorder: ContextVar[Recorder | None] = ContextVar("sglcore_cpu_recorder", default=None)
"""Who records the kernel calls of this thread, if anyone does."""


class Library:
    """One built library, loaded; raises `NativeUnavailable` if it is missing, damaged, or older
    than `sources`."""

    def __init__(self, path: Path = SOURCES.parent / LIBRARY, sources: Path = SOURCES) -> None:
        self.path = path
        if not path.exists():
            raise NativeUnavailable(f"{path.name} is not there; {_build_error(path)}")
        try:
            self._c = ctypes.CDLL(str(path))
            declare(self._c)
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"{path.name} can not be loaded: {error}; {REBUILD}") from None
        built = self._c.sgl_source_digest().decode()
        if sources.is_dir() and built != source_digest(sources):
            raise NativeUnavailable(f"{path.name} was built from other sources than those beside it; {REBUILD}")
        count = self._c.sgl_num_instruction_sets()
        self.levels = {
            self._c.sgl_instruction_set_name(place).decode(): self._c.sgl_instruction_set_level(place)
            for place in range(count)
        }
        self.emulates = bool(self._c.sgl_emulates())

    @property
    def processor_level(self) -> int:
        """The level of this processor, as `isa.h` counts them; 0 where it has none that the library
        is built for."""
        return int(self._c.sgl_processor_level())

    def usable(self) -> tuple[str, ...]:
        """The instruction sets that this processor announces, ascending; with emulation, all that
        avx512 can stand for."""
        most = self.processor_level
        if self.emulates and most >= 3:
            most = 6
        return tuple(name for name, level in self.levels.items() if level <= most)

    def engine(self, instruction_set: str, threads: int, cores: Sequence[Sequence[int]] = ()) -> Engine:
        """Kernels of one instruction set with their own threads; `threads` counts the caller.
        Thread i may run on cores[i] only, the caller and who has none anywhere. It is not checked
        whether this processor announces the instruction set."""
        place = tuple(self.levels).index(instruction_set)
        flat = [core for one in cores for core in (*one, -1)]
        array = (ctypes.c_int * len(flat))(*flat)
        handle = self._c.sgl_engine_new(place, threads, array, len(flat))
        if not handle:
            raise NativeUnavailable(f"{threads} threads can not be made; ask for fewer with --threads")
        return Engine(self._c, handle, instruction_set, threads)


class Engine:
    """Kernels by name, as attributes of nothing: `engine.kernel("linear")` is called with its
    arguments by name.

    One engine belongs to one thread at a time. Calls wait until the kernel is done, and let other
    threads of Python run.
    """

    def __init__(self, c: ctypes.CDLL, handle: int, instruction_set: str, threads: int) -> None:
        self._c = c
        self._handle = handle
        self.instruction_set = instruction_set
        self.threads = threads
        self.kernels: dict[str, NativeKernel] = {}
        for number in range(c.sgl_num_kernels(handle)):
            name = c.sgl_kernel_name(handle, number).decode()
            self.kernels[name] = NativeKernel(self, number, c.sgl_kernel_layout(handle, number).decode())

    def kernel(self, name: str) -> NativeKernel:
        """The kernel of that name; raises `NativeUnavailable` if this library lacks it."""
        if name not in self.kernels:
            raise NativeUnavailable(f"the native library has no kernel {name!r}; {REBUILD}")
        return self.kernels[name]

    def call(self, number: int, arguments: bytes) -> None:
        """Run one kernel, or hand the call to who records. Raises MemoryError, and RuntimeError if
        another thread is in it."""
        recording = recorder.get()
        if recording is not None:
            recording.add(self, number, arguments)
        else:
            check(self._c.sgl_call(self._handle, number, arguments))

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A new tensor for a kernel's result, contiguous, at a multiple of 64 bytes; undefined
        content."""
        recording = recorder.get()
        if recording is not None:
            return recording.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def program(self) -> Program:
        """An empty list of calls."""
        return Program(self, self._c)

    @property
    def handle(self) -> int:
        """The library's own."""
        return self._handle

    def __del__(self) -> None:
        self._c.sgl_engine_free(self._handle)


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """One kernel: `names` of its arguments in order."""

    engine: Engine
    number: int
    layout: str

    @property
    def names(self) -> tuple[str, ...]:
        """Of its arguments."""
        return tuple(word.partition(":")[2] for word in self.layout.split())

    def bind(self) -> BoundKernel:
        """The form that is called."""
        return BoundKernel(self)


class BoundKernel:
    """A kernel that is called with every argument by name: addresses and integers as int, reals as
    float."""

    __slots__ = ("_call", "_names", "_number", "_pack")

    def __init__(self, kernel: NativeKernel) -> None:
        self._names = kernel.names
        self._pack = struct.Struct("=" + "".join(_CODES[word[0]] for word in kernel.layout.split())).pack
        self._number = kernel.number
        self._call = kernel.engine.call

    def __call__(self, **arguments: float) -> None:
        """Run it. Raises KeyError for a missing argument, TypeError for one too many,
        MemoryError."""
        if len(arguments) != len(self._names):
            raise TypeError(f"found {', '.join(arguments)}; wanted {', '.join(self._names)}")
        self._call(self._number, self._pack(*[arguments[name] for name in self._names]))


class Program:
    """Kernel calls in the order in which they are to run."""

    def __init__(self, engine: Engine, c: ctypes.CDLL) -> None:
        self._engine = engine
        self._c = c
        self._handle = c.sgl_program_new(engine.handle)

    def add(self, kernel: int, arguments: bytes) -> None:
        """Append a call with its arguments as they are now."""
        self._c.sgl_program_add(self._handle, kernel, arguments)

    def __len__(self) -> int:
        return int(self._c.sgl_program_size(self._handle))

    def run(self, first: int, last: int) -> None:
        """The calls [first, last). Waits; raises MemoryError, and RuntimeError if another thread is
        in the engine."""
        check(self._c.sgl_program_run(self._handle, first, last))

    def __del__(self) -> None:
        self._c.sgl_program_free(self._handle)


REBUILD = "build it with `python -m sglcore_cpu.compile`"


def check(outcome: int) -> None:
    """Raise what a call's outcome says, if it was not done."""
    if outcome == 1:
        raise MemoryError("a native kernel found no memory for its own use")
    if outcome:
        raise RuntimeError("two threads called one engine at once; an engine belongs to one thread: start one for each")


def declare(c: ctypes.CDLL) -> None:
    """The C functions' types. Raises AttributeError for one that is missing."""
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    types = {
        "sgl_source_digest": (text,),
        "sgl_processor_level": (integer,),
        "sgl_emulates": (integer,),
        "sgl_num_instruction_sets": (integer,),
        "sgl_instruction_set_name": (text, integer),
        "sgl_instruction_set_level": (integer, integer),
        "sgl_engine_new": (pointer, integer, integer, pointer, integer),
        "sgl_engine_free": (None, pointer),
        "sgl_num_kernels": (integer, pointer),
        "sgl_kernel_name": (text, pointer, integer),
        "sgl_kernel_layout": (text, pointer, integer),
        "sgl_call": (integer, pointer, integer, text),
        "sgl_program_new": (pointer, pointer),
        "sgl_program_free": (None, pointer),
        "sgl_program_add": (None, pointer, integer, text),
        "sgl_program_size": (integer, pointer),
        "sgl_program_run": (integer, pointer, integer, integer),
    }
    for name, (result, *arguments) in types.items():
        function = getattr(c, name)
        function.restype, function.argtypes = result, arguments


def _build_error(path: Path) -> str:
    """What the installer's compiler said, if it kept that."""
    try:
        return path.with_suffix(".error").read_text(encoding="utf-8").strip()
    except OSError:
        return REBUILD
