"""Declare and read a frozen record of settings: explicit arguments first, then `SGLCORE_*`
variables, each with its type.

A record is a dataclass of `setting` fields: bool, int, float, str, or tuples of int or str,
optionally `| None`. Its field `sources` names the source of each value that is not a default.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from sglcore.core.errors import ConfigError

PREFIX = "SGLCORE_"

_SIZE = re.compile(r"(.*?)\s*([KMGT])(?:iB?)?", re.IGNORECASE)
_UNITS = MappingProxyType({"K": 10, "M": 20, "G": 30, "T": 40})


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of one setting, as `settings_of` reads it from a record's field: its name,
    type and help, its allowed values and limits, and whether it is a memory size or a secret."""

    name: str
    """The name of the field; its flag is `--NAME` with hyphens."""
    kind: str
    """The annotation of the field as text, such as "int | None"."""
    help: str
    """One line for `--help`. It explains each of `choices`."""
    choices: tuple[str, ...] = ()
    """The allowed values; empty: any value of the kind."""
    least: int | None = None
    """The smallest allowed number, inclusive. None: no limit."""
    most: int | None = None
    """The largest allowed number, inclusive. None: no limit."""
    is_memory: bool = False
    """Whether text such as 512M is accepted for the number of bytes."""
    is_secret: bool = False
    """Whether errors and the record's repr must not show the value."""

    @property
    def variable(self) -> str:
        """The name of its environment variable, such as SGLCORE_MAX_REQUESTS."""
        return f"{PREFIX}{self.name.upper()}"


def setting(default: Any, help: str, **declared: Any) -> Any:
    """Return the dataclass field that declares a setting with this default and help text.
    `declared`: further fields of `Setting` by name, such as `least=1`; the names are checked only
    when `settings_of` reads them. A field with `is_secret=True` is left out of the record's
    repr."""
    is_secret = declared.get("is_secret", False)
    return field(default=default, repr=not is_secret, metadata={"help": help, **declared})


def settings_of(record: type[Any]) -> dict[str, Setting]:
    """Return a record class's settings by name, in the order of its fields; `sources` is not
    one."""
    return {
        item.name: Setting(item.name, str(item.type), **item.metadata)
        for item in fields(record)
        if item.name != "sources"
    }


def resolve(record: type[Any], given: Mapping[str, object], environ: Mapping[str, str], *others: type[Any]) -> Any:
    """Return an instance of `record` from the arguments `given` and the variables in `environ`.
    Arguments win; an argument that is None and an empty variable count as not given. The field
    `sources` gets "argument" or the variable's name for each given setting.

    Variables of the record classes `others` are allowed in `environ` and not read. Raises
    ConfigError for a `SGLCORE_*` variable of no record, even an empty one, for an unknown argument,
    and for a value of the wrong kind; all name what is known or wanted. Limits and choices are
    checked by the record itself, if its `__post_init__` calls `check_values`.
    """
    known = settings_of(record)
    values = {name: value for name, value in given.items() if value is not None}
    _refuse_unknown("setting", values, known)
    texts = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    _refuse_unknown(
        "variable", texts, [item.variable for each in (record, *others) for item in settings_of(each).values()]
    )
    sources = dict.fromkeys(values, "argument")
    checked = {name: _checked(known[name], value) for name, value in values.items()}
    for name, item in known.items():
        text = texts.get(item.variable)
        if name not in values and text:
            sources[name] = item.variable
            checked[name] = _parsed(item, text)
    return record(**checked, sources=MappingProxyType(sources))


def check_values(record: Any) -> None:
    """Raise ConfigError for the first setting of `record`, an instance, that is out of range or not
    one of its choices. None is always allowed; types are not checked."""
    for name, item in settings_of(type(record)).items():
        value = getattr(record, name)
        if item.choices and value is not None and value not in item.choices:
            wanted, remedy = f"one of {', '.join(item.choices)}", f"correct {name}"
            hint = _suggestion(str(value).lower(), item.choices, remedy)
            raise ConfigError(f"{name} is {value!r}", wanted=wanted, remedy=hint)
        if item.least is not None and value is not None and value < item.least:
            wanted = "a positive number" if item.least == 1 else f"{item.least} or more"
            raise ConfigError(f"{name} is {value}; it must be at least {item.least}. Give {wanted} or leave it out.")
        if item.most is not None and value is not None and value > item.most:
            raise ConfigError(f"{name} is {value}; it must be at most {item.most}. Give no more or leave it out.")


def memory_bytes(name: str, text: str) -> int:
    """Return the number of bytes of a size such as 512M, 1.5 GiB or 1073741824, rounded down; K, M,
    G and T, also as Ki or KiB and so on, in either case, are powers of 1024. Raises ConfigError,
    which names the setting `name`, for anything else, also for KB or MB, which are powers of 1000
    elsewhere. A negative size is not refused here."""
    found = _SIZE.fullmatch(text.strip())
    try:
        number, unit = found.groups() if found else (text, "")
        return int(float(number) * (1 << _UNITS[unit.upper()] if unit else 1))
    except (ValueError, OverflowError):
        raise ConfigError(f"{name} is {text!r}", wanted="a size such as 512M, 4G or 1073741824") from None


def _refuse_unknown(what: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in sorted(set(names) - set(known)):
        hint = _suggestion(name, known, f"known: {', '.join(known)}")
        raise ConfigError(f"unknown {what} {name}", remedy=hint)


def _suggestion(word: str, known: Collection[str], otherwise: str) -> str:
    """Return "did you mean WORD?" with the known word nearest to `word`, or `otherwise` if none is
    similar."""
    near = get_close_matches(word, known, 1)
    return f"did you mean {near[0]}?" if near else otherwise


def _checked(item: Setting, value: object) -> Any:
    """Return an argument's value in the declared type of its setting. Converts text such as "512M"
    to bytes where `is_memory`, a path object to text, a list to a tuple, and an int to a float.
    Raises ConfigError if it has another type. Limits and choices are not checked."""
    kind = item.kind
    if item.is_memory and isinstance(value, str):
        return memory_bytes(item.name, value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if kind.startswith("tuple") and isinstance(value, list):
        value = tuple(value)
    if not _fits(value, kind):
        raise ConfigError(f"{item.name} is {_shown(item, value)}", wanted=_wanted(kind), remedy=f"correct {item.name}")
    return float(value) if kind.startswith("float") and isinstance(value, int) else value


def _fits(value: object, kind: str) -> bool:
    if kind.startswith("bool"):
        return isinstance(value, bool)
    if kind.startswith("tuple"):
        item = kind.removeprefix("tuple[")
        return isinstance(value, tuple) and all(_fits(each, item) for each in value)
    if kind.startswith("int"):
        return isinstance(value, int) and not isinstance(value, bool)
    if kind.startswith("float"):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, str)


def _parsed(item: Setting, text: str) -> Any:
    """Return the value of an environment variable's text, in the declared type of its setting. A
    tuple is separated by commas, without the spaces around them; a bool is 0, 1, true or false.
    Raises ConfigError for text of another kind. Limits and choices are not checked."""
    variable, kind = item.variable, item.kind
    if item.is_memory:
        return memory_bytes(variable, text)
    if kind.startswith("bool"):
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{variable} is {text!r}", wanted="0 or 1")
        return text.lower() in ("1", "true")
    parts = tuple(part.strip() for part in text.split(",")) if kind.startswith("tuple") else (text,)
    try:
        values = tuple(_number(part, kind.removeprefix("tuple[")) for part in parts)
    except (ValueError, OverflowError):
        raise ConfigError(f"{variable} is {_shown(item, text)}", wanted=_wanted(kind)) from None
    return values if kind.startswith("tuple") else values[0]


def _number(text: str, kind: str) -> int | float | str:
    if kind.startswith("int"):
        return int(text)
    if not kind.startswith("float"):
        return text
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _shown(item: Setting, value: object) -> str:
    return "not what it should be (its value is secret)" if item.is_secret else repr(value)


def _wanted(kind: str) -> str:
    return kind.replace(" | None", "")
