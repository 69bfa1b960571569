"""Python's garbage collector, off while something is built that stays, or captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection"]


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected inside; afterwards the collector is on if it was on before.

    What was made inside then counts as old: the next collection of young objects would search all of it, and it stays.
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
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
