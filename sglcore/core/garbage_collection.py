"""`no_collection`: a context manager that disables Python's garbage collector while permanent
objects are built, or a graph is captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection"]

MANY = 10_000
"""Number of young objects above which a freeze pays: searching this many takes a millisecond, as
long as counting the frozen objects."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection inside; afterwards the collector is on if it was on before.

    If it was on and many objects were made inside, all present objects are then marked as old:
    those made inside are permanent, and the next collection of young objects would search them in
    vain.
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
    """Mark all objects as old without a search, if at least MANY young ones exist. Does nothing if
    frozen objects exist, because they would be unfrozen.
    """
    if gc.get_count()[0] >= MANY and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
