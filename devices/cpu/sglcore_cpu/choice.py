"""Which kernels serve: the native ones of the highest instruction set that the processor announces,
or torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from sglcore.device.errors import ConfigError
from sglcore.device.ledger import Row
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.compile import ARM, X86, Variant
from sglcore_cpu.first_start import find_library
from sglcore_cpu.kernels import torch_kernels
from sglcore_cpu.native import Engine, Library, NativeUnavailable
from sglcore_cpu.table import native_table

NATIVE = "native"
TORCH = "torch"
NAMES = tuple(one.name for one in (*X86, *ARM))
"""Instruction sets, as `--kernels` takes them to have one in particular."""
BUILD_ALL = "python -m sglcore_cpu.compile --sets all"


@functools.cache
def load_library() -> Library:
    """This installation's library, compiled first where it has none. It never changes while a
    process runs."""
    return find_library()


def engine_of_one(load: Callable[[], Library] = load_library) -> Engine:
    """The kernels of the highest instruction set that the processor announces, for one thread.
    Raises NativeUnavailable."""
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
        return torch_kernels(), Row("kernels", "auto", TORCH, str(error), downgrade=True)
    lacks = "" if asked in NAMES else _lacks(chosen, library)
    reason = lacks or ("asked for" if asked in NAMES else "the highest that this processor announces")
    table, others = native_table(engine), torch_kernels().origin
    by_torch = ", ".join(name for name, origin in table.origin.items() if origin == others.get(name))
    remedy = BUILD_ALL if lacks else f"--kernels {TORCH}"
    why = f"{reason}; torch's own for {by_torch}"
    return table, Row("kernels", asked, f"native, {chosen}", why, remedy, downgrade=bool(lacks))


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
    if asked in usable:
        return asked
    wanted = f"one of {', '.join(usable)}"
    if asked in _announced(library):
        raise ConfigError(
            f"kernels is {asked!r}, and the library was built without it", wanted=wanted, remedy=BUILD_ALL
        )
    raise ConfigError(f"kernels is {asked!r}, and this processor does not announce it", wanted=wanted)


def _announced(library: Library) -> tuple[str, ...]:
    """All instruction sets of this kind of machine that this processor announces, ascending."""
    return tuple(one.name for one in Variant().instruction_sets if one.level <= library.processor_level)


def _lacks(chosen: str, library: Library) -> str:
    """That this processor announces more than the library was built for; empty if it does not."""
    announced = _announced(library)
    if not announced or chosen not in announced[:-1] or announced[-1] in library.levels:
        return ""
    return f"the highest that the library was built for, and this processor announces {announced[-1]}"
