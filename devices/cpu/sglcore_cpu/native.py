"""Load, check and call the native library. This module knows no kernel: the library lists their
names and arguments.

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
"""The element types that kernels compute in, and their numbers in kernel arguments."""


class NativeUnavailable(RuntimeError):
    """The native kernels can not run here; the text gives the reason and the remedy."""


class Recorder(Protocol):
    """Takes every kernel call while a step is captured, in place of running the kernel; `Recording`
    implements it."""

    def add(self, engine: Engine, kernel: int, arguments: bytes) -> None:
        """Record a call of an engine's kernel number `kernel` with the packed words `arguments`."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor for a result; its address stays reserved for the recorded step. Its
        content is undefined to the caller."""
        ...

    def kernel(self, name: str) -> BoundKernel | None:
        """Return the callable kernel `name` of the step's engine; None before the step has called
        any kernel. Raises NativeUnavailable if there is no such kernel."""
        ...

    def host(self, function: Callable[..., object], *arguments: object) -> None:
        """Record a Python call `function(*arguments)` that is not a torch operation, in order with
        the other calls. It is not made now, only at each replay; its result is dropped."""
        ...


recorder: ContextVar[Recorder | None] = ContextVar("sglcore_cpu_recorder", default=None)
"""The recorder of this thread's kernel calls, if any."""


class Library:
    """One loaded library, which makes engines. Making it raises `NativeUnavailable` if the file at
    `path` is missing, damaged, or built from other sources than those in `sources` (not checked if
    that folder does not exist). `levels`: level by name of its instruction sets."""

    def __init__(self, path: Path = SOURCES.parent / LIBRARY, sources: Path = SOURCES) -> None:
        self.path = path
        if not path.exists():
            raise NativeUnavailable(f"{path.name} is not there; {_build_error(path)}")
        try:
            self._c = ctypes.CDLL(str(path))
            declare(self._c)
        except (OSError, AttributeError) as error:
            raise NativeUnavailable(f"{path.name} cannot be loaded: {error}; {REBUILD}") from None
        built = self._c.sgl_source_digest().decode()
        if sources.is_dir() and built != source_digest(sources):
            raise NativeUnavailable(
                f"{path.name} was built from sources that differ from the installed ones; {REBUILD}"
            )
        count = self._c.sgl_num_instruction_sets()
        self.levels = {
            self._c.sgl_instruction_set_name(place).decode(): self._c.sgl_instruction_set_level(place)
            for place in range(count)
        }
        self.emulates = bool(self._c.sgl_emulates())

    @property
    def processor_level(self) -> int:
        """The level of the highest instruction set that this processor announces, as `isa.h`
        numbers them, whether the library has it or not; 0 if it announces none of them."""
        return int(self._c.sgl_processor_level())

    def usable(self) -> tuple[str, ...]:
        """Return the names of the library's instruction sets that this processor announces, lowest
        level first; empty if none. If the library emulates and the processor has avx512, all of
        them.
        """
        most = self.processor_level
        if self.emulates and most >= 3:
            most = 6
        return tuple(name for name, level in self.levels.items() if level <= most)

    def engine(self, instruction_set: str, threads: int, cores: Sequence[Sequence[int]] = ()) -> Engine:
        """Make an engine: the kernels of one instruction set and their threads. `threads` includes
        the calling thread, so threads - 1 are started. Thread i runs on cores[i] only; the caller,
        and threads without an entry, run anywhere. Does not check that this processor announces the
        instruction set. Raises ValueError for a name that the library lacks, NativeUnavailable if
        the threads can not be created."""
        place = tuple(self.levels).index(instruction_set)
        flat = [core for one in cores for core in (*one, -1)]
        array = (ctypes.c_int * len(flat))(*flat)
        handle = self._c.sgl_engine_new(place, threads, array, len(flat))
        if not handle:
            raise NativeUnavailable(f"{threads} threads cannot be created; request fewer with --threads")
        return Engine(self._c, handle, instruction_set, threads)


class Engine:
    """The kernels of one instruction set by name: `engine.kernel("linear").bind()(x=..., ...)`.

    One thread at a time may use an engine. A call waits until the kernel is done, with the GIL
    released; while a step is recorded, it is recorded instead of run. Its threads end with the
    object.
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
        """Return the kernel of that name; raises `NativeUnavailable` if the library lacks it."""
        if name not in self.kernels:
            raise NativeUnavailable(f"the native library has no kernel {name!r}; {REBUILD}")
        return self.kernels[name]

    def call(self, number: int, arguments: bytes) -> None:
        """Run the kernel with this number and wait; while a step is recorded on this thread, pass
        the call to the recorder instead. `arguments`: the packed words of its layout. Raises
        MemoryError, and RuntimeError if another thread is using the engine."""
        recording = recorder.get()
        if recording is not None:
            recording.add(self, number, arguments)
        else:
            check(self._c.sgl_call(self._handle, number, arguments))

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a new contiguous tensor for a kernel's result, with undefined content, at a
        multiple of 64 bytes. While a step is recorded, the recorder supplies the memory."""
        recording = recorder.get()
        if recording is not None:
            return recording.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def program(self) -> Program:
        """Make an empty list of kernel calls of this engine."""
        return Program(self, self._c)

    @property
    def handle(self) -> int:
        """The address of the engine in the library, for its C functions."""
        return self._handle

    def __del__(self) -> None:
        self._c.sgl_engine_free(self._handle)


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """One kernel of an engine: its number, and `layout`, the types and names of its arguments in
    order, such as "P:x I:rows D:eps" (P address, I integer, D double)."""

    engine: Engine
    number: int
    layout: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its arguments, in order."""
        return tuple(word.partition(":")[2] for word in self.layout.split())

    def bind(self) -> BoundKernel:
        """Return a callable that packs its named arguments and runs the kernel. Make it once:
        binding takes longer than a call."""
        return BoundKernel(self)


class BoundKernel:
    """A callable kernel. Every argument is passed by name: addresses and integers as int, doubles
    as float."""

    __slots__ = ("_call", "_names", "_number", "_pack")

    def __init__(self, kernel: NativeKernel) -> None:
        self._names = kernel.names
        self._pack = struct.Struct("=" + "".join(_CODES[word[0]] for word in kernel.layout.split())).pack
        self._number = kernel.number
        self._call = kernel.engine.call

    def __call__(self, **arguments: float) -> None:
        """Run the kernel and wait, or record the call as `Engine.call` does. Raises TypeError for a
        wrong number of arguments, KeyError for a wrong name, MemoryError, and RuntimeError if
        another thread is using the engine. Addresses and sizes are not checked."""
        if len(arguments) != len(self._names):
            raise TypeError(f"found {', '.join(arguments)}; wanted {', '.join(self._names)}")
        self._call(self._number, self._pack(*[arguments[name] for name in self._names]))


class Program:
    """A list of kernel calls of one engine, in the order in which they run; its length is their
    number. It is kept in the library and freed with the object."""

    def __init__(self, engine: Engine, c: ctypes.CDLL) -> None:
        self._engine = engine
        self._c = c
        self._handle = c.sgl_program_new(engine.handle)

    def add(self, kernel: int, arguments: bytes) -> None:
        """Append a call of the engine's kernel number `kernel`, with a copy of its packed
        arguments."""
        self._c.sgl_program_add(self._handle, kernel, arguments)

    def __len__(self) -> int:
        return int(self._c.sgl_program_size(self._handle))

    def run(self, first: int, last: int) -> None:
        """Run the calls [first, last) and wait. Raises MemoryError, and RuntimeError if another
        thread is using the engine."""
        check(self._c.sgl_program_run(self._handle, first, last))

    def __del__(self) -> None:
        self._c.sgl_program_free(self._handle)


REBUILD = "build it with `python -m sglcore_cpu.compile`"


def check(outcome: int) -> None:
    """Raise MemoryError for outcome 1 of a native call, RuntimeError (two threads used one engine)
    for any other except 0."""
    if outcome == 1:
        raise MemoryError("a native kernel could not allocate its work memory")
    if outcome:
        raise RuntimeError("two threads called one engine at once; an engine belongs to one thread: start one for each")


def declare(c: ctypes.CDLL) -> None:
    """Set the argument and result types of the library's C functions on `c`. Raises AttributeError
    if one is missing."""
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
    """Return the compiler's message that the installation wrote next to the library at `path`; if
    there is none, the command that builds the library."""
    try:
        return path.with_suffix(".error").read_text(encoding="utf-8").strip()
    except OSError:
        return REBUILD
