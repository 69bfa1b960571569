"""References: names in a declaration that are imported only when they are used."""

from __future__ import annotations

from importlib import import_module
from typing import Any, TypeAlias

from sglcore.core.errors import DeviceError

Ref: TypeAlias = str
"""`"module:name"`: an object that is imported only when it is used. `"wrapper(ref)"`: the result of
the function `wrapper` for that object; adapters write this.
"""


def wrapped(ref: Ref, by: Ref) -> Ref:
    """Return the reference to the result of function `by` for the object of `ref`. Each `resolve`
    calls `by` once with the function or class; it returns the replacement.
    """
    return f"{by}({ref})"


def modules(ref: Ref, package: str = "") -> tuple[str, ...]:
    """Return the modules of a reference: those of its wrappers, then its own. `package` is for
    messages. Raises `DeviceError` if a part is not `module:name`.
    """
    wrapper, inner = _parts(ref)
    if wrapper:
        return (*modules(wrapper, package), *modules(inner, package))
    return (_split(inner, package)[0],)


def _parts(ref: Ref) -> tuple[Ref, Ref]:
    """Return the wrapper of a reference (empty if it has none) and what it wraps."""
    wrapper, _, inner = ref.partition("(")
    return (wrapper, inner[:-1]) if wrapper and inner.endswith(")") else ("", ref)


def _split(ref: Ref, package: str) -> tuple[str, str]:
    """Return module and dotted name of a reference without a wrapper. Raises `DeviceError` if it is
    not `module:name`.
    """
    module, _, name = ref.partition(":")
    parts = (*module.split("."), *name.split("."))
    if not all(part.isidentifier() for part in parts):
        raise DeviceError(f"{owner(package)} refers to {ref!r}", wanted="a reference such as 'package.module:name'")
    return module, name


def resolve(ref: Ref, package: str = "") -> Any:
    """Import the object of a reference; for a wrapped reference, call the wrapper with it.
    `package`: the device package that declares it, for messages; empty: none.

    Raises `DeviceError` if the module or the name does not exist. An error inside the module keeps
    its traceback and gets a note that names the package.
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
    """Return the text that names the owner of a reference in messages; an empty `package` is "a
    declaration".
    """
    return f"device package {package!r}" if package else "a declaration"


def _remedy(package: str) -> str:
    return f"pip install --upgrade sglcore-{package}" if package else "correct the reference"
