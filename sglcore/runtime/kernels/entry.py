"""How an operation of the kernel table is declared."""

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
    """One declared operation. A table's attribute of its name is the function that runs there.

    `reference` defines it; a device may replace it. One that `is_optional` only a device has (None elsewhere), and it goes
    when an entry that it `rests_on` is replaced. It `writes` the arguments of these names, which are its results, and may
    write those that it `spoils`; no other. `shapes` are those of arguments that may have any value, T the number of rows, a
    star for float32 whatever the others are, and the arguments that are no tensors; entries without them take what the kit
    makes for them alone.
    """

    reference: Kernel
    is_optional: bool = False
    rests_on: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    spoils: tuple[str, ...] = ()
    shapes: tuple[tuple[Any, ...], ...] = ()
    name: str = ""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its arguments."""
        return tuple(inspect.signature(self.reference).parameters)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, table: None, owner: type) -> Entry[K]: ...
    @overload
    def __get__(self, table: object, owner: type) -> K: ...
    def __get__(self, table: object, owner: type) -> Any:
        """The declaration, of the class; a table has its functions as attributes of its own, which come first."""
        return self


def entry(reference: Function, **more: Any) -> Entry[Function]:
    """An operation that every table has: the reference until a device replaces it. `more` as in `Entry`."""
    return Entry(reference, **more)


def optional(reference: Function, **more: Any) -> Entry[Function | None]:
    """An operation that a table has where a device gives it."""
    return Entry(reference, True, **more)
