"""Which kernels serve: the native ones of the highest instruction set that the processor announces, or torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from sglcore.device.errors import ConfigError
from sglcore.device.ledger import Row
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.compile import ARM, X86
from sglcore_cpu.kernels import torch_kernels
from sglcore_cpu.native import Engine, Library, NativeUnavailable
from sglcore_cpu.table import native_table

NATIVE = "native"
TORCH = "torch"
NAMES = tuple(one.name for one in (*X86, *ARM))
"""Instruction sets, as `--kernels` takes them to have one in particular."""


@functools.cache
def load_library() -> Library:
    """The library beside this package. It never changes while a process runs."""
    return Library()


def engine_of_one(load: Callable[[], Library] = load_library) -> Engine:
    """The kernels of the highest instruction set that the processor announces, for one thread. Raises NativeUnavailable."""
    library = load()
    return library.engine(_instruction_set("auto", library), 1)


def choose_kernels(
    asked: str, threads: int, cores: Sequence[Sequence[int]] = (), load: Callable[[], Library] = load_library
) -> tuple[KernelTable, Row]:
    """The table for "auto", "native" or an instruction set's name, and its row of the ledger.

    Raises ConfigError for what is not usable here, if it was asked for.
    """
    try:
        library = load()
        chosen = _instruction_set(asked, library)
        engine = library.engine(chosen, threads, cores)
    except NativeUnavailable as error:
        if asked != "auto":
            raise ConfigError(f"kernels {asked!r} can not serve: {error}", wanted="the native library") from None
        return torch_kernels(), Row("kernels", "auto", TORCH, str(error), "the remedy in the reason", downgrade=True)
    reason = "asked for" if asked in NAMES else "the highest that this processor announces"
    table, others = native_table(engine), torch_kernels().origin
    by_torch = ", ".join(name for name, origin in table.origin.items() if origin == others.get(name))
    return table, Row(
        "kernels", asked, f"native, {chosen}", f"{reason}; torch's own for {by_torch}", f"--kernels {TORCH}"
    )


def kernels() -> KernelTable:
    """The table of this processor, with as many threads as torch has."""
    return choose_kernels("auto", torch.get_num_threads())[0]


def _instruction_set(asked: str, library: Library) -> str:
    usable = library.usable()
    if not usable:
        raise NativeUnavailable(
            f"this processor has none of the instruction sets that the library is built for: {', '.join(library.levels)}"
        )
    if asked in ("auto", NATIVE):
        return usable[-1]
    if asked not in usable:
        raise ConfigError(
            f"kernels is {asked!r}, and this processor does not announce it", wanted=f"one of {', '.join(usable)}"
        )
    return asked
