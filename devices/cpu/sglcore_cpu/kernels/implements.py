"""`implements` marks a method as the implementation of a kernel table entry; `entries` collects the
marked methods of objects."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from sglcore.runtime.kernels.table import Limited

P = ParamSpec("P")
R = TypeVar("R")
Takes = Callable[..., str]


class Implementation(Generic[P, R]):
    """The descriptor that `implements` puts in a class in place of a method. The method implements
    the kernel table entry of its name; accessed on an object it is the plain bound method, without
    checks. `takes(*call)` returns why a call is not for this method, "" if it is (see `Limited`);
    None: it takes every call."""

    def __init__(self, function: Callable[Concatenate[Any, P], R], takes: Takes | None) -> None:
        self._function, self._takes = function, takes
        self.__doc__ = function.__doc__

    def __get__(self, owner: object, kind: type | None = None) -> Callable[P, R]:
        return MethodType(self._function, owner)

    def given(self, owner: object) -> Callable[P, R] | Limited:
        """Return the entry's value for the table: the bound method of `owner`, in a `Limited` if
        `takes` was given."""
        method = self.__get__(owner)
        return method if self._takes is None else Limited(method, self._takes)


class _Decorator:
    def __init__(self, takes: Takes | None) -> None:
        self._takes = takes

    def __call__(self, function: Callable[Concatenate[Any, P], R]) -> Implementation[P, R]:
        return Implementation(function, self._takes)


def implements(takes: Takes | None = None) -> _Decorator:
    """Return a decorator that marks a method as the implementation of the kernel table entry of the
    same name. `takes(*call)` gets the entry's arguments without content and returns why the method
    does not take them, "" if it does (see `Limited`); None: it takes every call."""
    return _Decorator(takes)


def entries(*owners: object) -> dict[str, Callable[..., Any] | Limited]:
    """Return the entries that the marked methods of these objects implement, by name: bound
    methods, or `Limited` ones. Inherited methods do not count. Raises ValueError if two objects
    implement one entry."""
    found: dict[str, Callable[..., Any] | Limited] = {}
    for owner in owners:
        own = {name: value for name, value in vars(type(owner)).items() if isinstance(value, Implementation)}
        if twice := found.keys() & own.keys():
            raise ValueError(f"two objects implement the kernel table entries {', '.join(sorted(twice))}")
        found |= {name: value.given(owner) for name, value in own.items()}
    return found
