"""Kernels for another architecture (Arm), run by an emulator, with the interface of `native`.

The same tests run on them. A call goes to the emulated process, which fetches the pages it touches
from this process.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

from sglcore_cpu.native import Engine, NativeUnavailable

COMPILER, EMULATOR, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
REMEDY = "install g++-aarch64-linux-gnu and qemu-user, or run tools/install_compilers.py"
DRIVER = Path(__file__).with_name("far.cpp")
PAGE = 4096
NEW, FREE, DESCRIBE, CALL, LEVEL, NEED_PAGE, DONE = range(1, 8)


def missing() -> str:
    """Return why Arm kernels can not be built and run here, with the remedy; empty if they can."""
    lacking = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found; {REMEDY}" if lacking else ""


def build_driver(driver: Path, library: Path) -> Path:
    """Build the driver, linked to a library for Arm. Raises CalledProcessError."""
    rpath = f"-Wl,-rpath,{library.parent}"
    command = (COMPILER, "-std=c++17", "-O2", "-Wall", "-Wextra", DRIVER, library, rpath, "-o", driver)
    subprocess.run([str(word) for word in command], check=True)
    return driver


class Pipe:
    """Sends words and bytes to a child process and receives them."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def send(self, *words: int, data: bytes = b"") -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(struct.pack(f"={len(words)}Q", *words) + data)
        self._child.stdin.flush()

    def receive(self, size: int) -> bytes:
        assert self._child.stdout is not None
        data = self._child.stdout.read(size)
        if len(data) != size:
            raise RuntimeError(f"the emulated process ended with {self._child.wait()}")
        return data

    def word(self) -> int:
        return int.from_bytes(self.receive(8), "little")

    def text(self) -> bytes:
        return self.receive(self.word())


class FarFunctions:
    """The C functions that `native.Engine` and `native.Program` call, over the pipe."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._kernels: dict[int, list[tuple[bytes, bytes]]] = {}
        self._to_free: list[int] = []
        self._programs: dict[int, tuple[int, list[tuple[int, bytes]]]] = {}

    def sgl_engine_new(self, threads: int) -> int:
        """Make an engine of the library's only instruction set; free the engines that are due."""
        while self._to_free:
            self._pipe.send(FREE, self._to_free.pop())
        self._pipe.send(NEW, threads)
        handle = self._pipe.word()
        self._pipe.send(DESCRIBE, handle)
        self._kernels[handle] = [(self._pipe.text(), self._pipe.text()) for _ in range(self._pipe.word())]
        return handle

    def sgl_engine_free(self, handle: int) -> None:
        """Free the engine when the next one is made: garbage collection may free it in the middle
        of another engine's call."""
        self._to_free.append(handle)

    def sgl_num_kernels(self, handle: int) -> int:
        return len(self._kernels[handle])

    def sgl_kernel_name(self, handle: int, kernel: int) -> bytes:
        return self._kernels[handle][kernel][0]

    def sgl_kernel_layout(self, handle: int, kernel: int) -> bytes:
        return self._kernels[handle][kernel][1]

    def sgl_call(self, handle: int, kernel: int, arguments: bytes) -> int:
        self._pipe.send(CALL, handle, kernel, len(arguments), data=arguments)
        while (what := self._pipe.word()) == NEED_PAGE:
            self._pipe.send(data=page_at(self._pipe.word()))
        assert what == DONE, f"found {what} from the emulated process"
        failed = self._pipe.word()
        while address := self._pipe.word():
            size = self._pipe.word()
            ctypes.memmove(address, self._pipe.receive(size), size)
        return failed

    def sgl_program_new(self, handle: int) -> int:
        number = len(self._programs) + 1
        self._programs[number] = (handle, [])
        return number

    def sgl_program_free(self, program: int) -> None:
        self._programs[program][1].clear()

    def sgl_program_add(self, program: int, kernel: int, arguments: bytes) -> None:
        self._programs[program][1].append((kernel, arguments))

    def sgl_program_size(self, program: int) -> int:
        return len(self._programs[program][1])

    def sgl_program_run(self, program: int, first: int, last: int) -> int:
        handle, calls = self._programs[program]
        return int(any(self.sgl_call(handle, kernel, arguments) for kernel, arguments in calls[first:last]))


class FarLibrary:
    """A library of one instruction set in an emulated process, like `native.Library`."""

    emulates = False

    def __init__(self, driver: Path, processor: str = "max") -> None:
        self._child = started(driver, processor)
        self._pipe = Pipe(self._child)
        self._functions: Any = FarFunctions(self._pipe)

    @property
    def processor_level(self) -> int:
        """The level of the emulated processor."""
        self._pipe.send(LEVEL)
        return self._pipe.word()

    def usable(self) -> tuple[str, ...]:
        """Return the instruction set if the emulated processor has it."""
        return ("neon",) if self.processor_level >= 1 else ()

    def engine(self, instruction_set: str, threads: int) -> Engine:
        """Make an engine with threads in the emulated process. Raises NativeUnavailable."""
        handle = self._functions.sgl_engine_new(threads)
        if not handle:
            raise NativeUnavailable(f"{threads} threads cannot be created")
        return Engine(self._functions, handle, instruction_set, threads)

    def close(self) -> None:
        """End the emulated process."""
        self._child.kill()
        self._child.wait()


def started(driver: Path, processor: str) -> subprocess.Popen[bytes]:
    """Start the emulated process, again if the emulator's own memory overlaps the addresses of this
    process's memory. Raises NativeUnavailable after 20 tries."""
    for _ in range(20):
        command = (EMULATOR, "-L", LIBRARIES, "-cpu", processor, str(driver))
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            Pipe(child).send(LEVEL)
            Pipe(child).word()
        except (OSError, RuntimeError):
            continue  # the emulator found no addresses for its own memory and ended
        here, there = spans("self"), spans(str(child.pid))
        if not any(first < end and start < last for first, last in here for start, end in there):
            return child
        child.kill()
        child.wait()
    raise NativeUnavailable("the emulator's memory lies over this process's in twenty tries")


def spans(process: str) -> list[tuple[int, int]]:
    """Return the mapped address ranges of a process, each with a margin of 2 GiB for growth."""
    room, found = 1 << 32, []
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        first, _, last = line.partition(" ")[0].partition("-")
        if "vsyscall" not in line:
            found.append((int(first, 16) - room // 2, int(last, 16) + room // 2))
    return found


def page_at(address: int) -> bytes:
    """Return the content of a page of this process. Raises AssertionError for an address below
    64 KiB, so that a faulty kernel is reported instead of crashing this process."""
    if address < 1 << 16:
        raise AssertionError(f"a kernel touched address {address:#x}")
    return ctypes.string_at(address, PAGE)
