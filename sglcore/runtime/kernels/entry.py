"""`entry` and `optional` declare an operation of the kernel table as an `Entry`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, overload

Kernel: TypeAlias = Callable[..., object]
K = TypeVar("K")
Function = TypeVar("Function", bound=Kernel)


@dataclass(eq=False)
class Entry(Generic[K]):
    """The declaration of one operation, a class attribute of `KernelTable`. The attribute of the
    same name of a table object is the function that runs.
    """

    reference: Kernel
    """The function that defines the results. A device may replace it."""
    is_optional: bool = False
    """Only tables of some devices have the entry; elsewhere it is None."""
    rests_on: tuple[str, ...] = ()
    """Entries on which this one depends. If a device replaces one of them, its table loses this
    entry, unless it replaces this one too."""
    writes: tuple[str, ...] = ()
    """Names of the arguments that receive the results."""
    spoils: tuple[str, ...] = ()
    """Names of further arguments that it may overwrite. It writes no others."""
    shapes: tuple[tuple[Any, ...], ...] = ()
    """Argument shapes for generated tests, for arguments that may have any value: T is the number
    of rows, a star means float32 regardless of the other dtypes, and an argument that is no tensor
    is given as its value. Empty: the conformance kit has a generator for this entry.
    """
    name: str = ""
    """Name in the table."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple(inspect.signature(self.reference).parameters)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, table: None, owner: type) -> Entry[K]: ...
    @overload
    def __get__(self, table: object, owner: type) -> K: ...
    def __get__(self, table: object, owner: type) -> Any:
        """Return the declaration, as an attribute of the class.

        A table's own attributes come first.
        """
        return self


def entry(reference: Function, **more: Any) -> Entry[Function]:
    """Declare an operation that every table has: the reference until a device replaces it.

    `more` are fields of `Entry`.
    """
    return Entry(reference, **more)


def optional(reference: Function, **more: Any) -> Entry[Function | None]:
    """Declare an operation that only tables of some devices have; in other tables the entry is
    None. `more` are fields of `Entry`.
    """
    return Entry(reference, True, **more)
