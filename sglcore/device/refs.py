"""References: what a declaration names without importing it, and how it is found when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeAlias

from sglcore.device.errors import DeviceError

Ref: TypeAlias = str
"""`"module:name"`: something that is imported only when it is used. `"wrapper(ref)"`: what the function `wrapper` makes of it,
as adapters write."""


def wrapped(ref: Ref, by: Ref) -> Ref:
    """The reference to what the function that `by` names makes of what `ref` names. It is called once for each `resolve`, with
    the function or class, and returns its stand-in."""
    return f"{by}({ref})"


def modules(ref: Ref, package: str = "") -> tuple[str, ...]:
    """The module of a reference, after those of its wrappers; raises `DeviceError` when one is not `module:name`."""
    wrapper, inner = _parts(ref)
    if wrapper:
        return (*modules(wrapper, package), *modules(inner, package))
    return (_split(inner, package)[0],)


def _parts(ref: Ref) -> tuple[Ref, Ref]:
    """The wrapper of a reference, empty if it has none, and what it wraps."""
    wrapper, _, inner = ref.partition("(")
    return (wrapper, inner[:-1]) if wrapper and inner.endswith(")") else ("", ref)


def _split(ref: Ref, package: str) -> tuple[str, str]:
    """The module and the dotted name of a reference without a wrapper; raises `DeviceError` when it is not `module:name`."""
    module, _, name = ref.partition(":")
    parts = (*module.split("."), *name.split("."))
    if not all(part.isidentifier() for part in parts):
        raise DeviceError(f"{owner(package)} refers to {ref!r}", wanted="a reference such as 'package.module:name'")
    return module, name


def resolve(ref: Ref, package: str = "") -> Any:
    """Import what a reference names; of a wrapped one, call the wrapper with it.

    Raises `DeviceError` when the module or the name does not exist. An error inside the module keeps its own traceback
    and gets a note that says who asked for it.
    """
    wrapper, inner = _parts(ref)
    if wrapper:
        return resolve(wrapper, package)(resolve(inner, package))
    module_name, name = _split(ref, package)
    found = _import(module_name, ref, package)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise DeviceError(
                f"{owner(package)} refers to {ref!r}, but module {module_name!r} has no attribute {name!r}",
                remedy=_remedy(package),
            ) from None
    return found


def _import(module_name: str, ref: Ref, package: str) -> Any:
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise DeviceError(
                f"{owner(package)} refers to {ref!r}, but there is no module {error.name!r}", remedy=_remedy(package)
            ) from None
        error.add_note(f"while importing {ref!r}, to which {owner(package)} refers")
        raise
    except Exception as error:
        error.add_note(f"while importing {ref!r}, to which {owner(package)} refers")
        raise


def owner(package: str) -> str:
    """Who refers, for a person."""
    return f"device package {package!r}" if package else "a declaration"


def _remedy(package: str) -> str:
    return f"pip install --upgrade sglcore-{package}" if package else "correct the reference"
