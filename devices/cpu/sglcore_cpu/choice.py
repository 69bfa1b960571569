"""Choice of the kernels: the native ones of the highest instruction set that library and processor
have, or torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from sglcore.core.errors import ConfigError
from sglcore.core.ledger import Row
from sglcore.runtime.kernels.table import KernelTable
from sglcore_cpu.compile import ARM, X86, Variant
from sglcore_cpu.first_start import find_library
from sglcore_cpu.kernels.table import native_table
from sglcore_cpu.kernels.torch_kernels import torch_kernels
from sglcore_cpu.native import Engine, Library, NativeUnavailable

NATIVE = "native"
TORCH = "torch"
NAMES = tuple(one.name for one in (*X86, *ARM))
"""Instruction sets that `--kernels` accepts by name."""
BUILD_ALL = "python -m sglcore_cpu.compile --sets all"


@functools.cache
def load_library() -> Library:
    """Load this installation's library; compile it first, waiting for minutes, if there is none.
    Cached for the life of the process. Raises NativeUnavailable."""
    return find_library()


def engine_of_one(load: Callable[[], Library] = load_library) -> Engine:
    """Make a new engine with one thread, for the highest instruction set that library and processor
    have. `load` returns the library. Raises NativeUnavailable."""
    library = load()
    return library.engine(_instruction_set("auto", library), 1)


def choose_kernels(
    asked: str, threads: int, cores: Sequence[Sequence[int]] = (), load: Callable[[], Library] = load_library
) -> tuple[KernelTable, Row]:
    """Return the kernel table and its ledger row for `asked`: "auto", "native" or the name of an
    instruction set. `threads` and `cores`: as in `Library.engine`. `load` returns the library. The
    row is not recorded here.

    If the native kernels can not run here, "auto" returns torch's table, with a row marked as a
    downgrade; any other choice raises ConfigError.
    """
    try:
        library = load()
        chosen = _instruction_set(asked, library)
        engine = library.engine(chosen, threads, cores)
    except NativeUnavailable as error:
        if asked != "auto":
            raise ConfigError(f"kernels {asked!r} cannot serve: {error}", wanted="the native library") from None
        return torch_kernels(), Row("kernels", "auto", TORCH, str(error), downgrade=True)
    lacks = "" if asked in NAMES else _lacks(chosen, library)
    reason = lacks or ("requested" if asked in NAMES else "the highest that this processor announces")
    table, others = native_table(engine), torch_kernels().origin
    by_torch = ", ".join(name for name, origin in table.origin.items() if origin == others.get(name))
    remedy = BUILD_ALL if lacks else f"--kernels {TORCH}"
    why = f"{reason}; torch's own for {by_torch}"
    return table, Row("kernels", asked, f"native, {chosen}", why, remedy, downgrade=bool(lacks))


def kernels() -> KernelTable:
    """Implements `DevicePackage.kernels`: return this processor's kernel table, as
    `choose_kernels("auto")` chooses it, with torch's number of threads."""
    return choose_kernels("auto", torch.get_num_threads())[0]


def _instruction_set(asked: str, library: Library) -> str:
    usable = library.usable()
    if not usable:
        raise NativeUnavailable(
            "this processor has none of the instruction sets that the library is built for: "
            f"{', '.join(library.levels)}"
        )
    if asked in ("auto", NATIVE):
        return usable[-1]
    if asked in usable:
        return asked
    wanted = f"one of {', '.join(usable)}"
    if asked in _announced(library):
        raise ConfigError(
            f"kernels is {asked!r}, but the library was built without it", wanted=wanted, remedy=BUILD_ALL
        )
    raise ConfigError(f"kernels is {asked!r}, but this processor does not announce it", wanted=wanted)


def _announced(library: Library) -> tuple[str, ...]:
    """Return the names of the instruction sets of this architecture that the processor announces,
    lowest first, whether the library was built with them or not."""
    return tuple(one.name for one in Variant().instruction_sets if one.level <= library.processor_level)


def _lacks(chosen: str, library: Library) -> str:
    """Return a phrase for the ledger if the processor announces a higher instruction set than
    `chosen` and the library was built without it; empty otherwise."""
    announced = _announced(library)
    if not announced or chosen not in announced[:-1] or announced[-1] in library.levels:
        return ""
    return f"the highest in the library, but this processor announces {announced[-1]}"
