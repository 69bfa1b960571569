"""Declares operations of the kernel table."""

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
    """One declared operation of the kernel table. A table's attribute of its name is the function
    that runs there.
    """

    reference: Kernel
    """The function that defines it. A device may replace it."""
    is_optional: bool = False
    """Only a device has it; elsewhere it is None."""
    rests_on: tuple[str, ...] = ()
    """The entries on which it depends. A table loses this entry when a device replaces one of
    them."""
    writes: tuple[str, ...] = ()
    """The arguments that are its results."""
    spoils: tuple[str, ...] = ()
    """The arguments that it may write besides. It writes no others."""
    shapes: tuple[tuple[Any, ...], ...] = ()
    """The shapes of arguments that may have any value: T is the number of rows, a star means
    float32 whatever the others are, and arguments that are no tensors stand as they are. Empty: the
    conformance kit makes its arguments."""
    name: str = ""
    """Its name in the table."""

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
    """Declare an operation that only tables of some devices have."""
    return Entry(reference, True, **more)
