"""Python's garbage collector, off while something is built that stays, or captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection"]

MANY = 10_000
"""So many young objects take a millisecond to search; as long takes the question whether anything is frozen, where it is."""


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected inside; afterwards the collector is on if it was on before.

    What was made inside then counts as old, if it is much: the next collection of young objects would search all of it,
    and it stays.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _let_all_be_old()
            gc.enable()


def _let_all_be_old() -> None:
    """Searches nothing. Nothing happens where somebody keeps objects frozen, because they would thaw."""
    if gc.get_count()[0] >= MANY and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
