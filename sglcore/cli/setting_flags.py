"""Flags of commands, made from the fields of EngineConfig and ServerConfig.

Each setting has the flag of its name, with hyphens, and the flags of other engines in `FLAGS`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer

from sglcore.cli.aliases import (
    ALWAYS,
    CONSTANTS,
    FLAGS,
    NODES_FLAG,
    SPECULATIVE_FLAG,
    SPECULATIVE_KEYS,
    drafter_name,
    dtype_name,
    graph_name,
)
from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.config.settings import Setting, settings_of
from sglcore.core.errors import ConfigError

OTHERS = "Flags of other engines"
PARTS: Mapping[type, str] = MappingProxyType({EngineConfig: "Engine", ServerConfig: "Server"})
"""Configuration record -> heading of its flags in help."""


def _flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_TYPES = (("bool", bool), ("int", int), ("float", float), ("str", str))
_NODES, _CONFIG = (flag.removeprefix("--").replace("-", "_") for flag in (NODES_FLAG, SPECULATIVE_FLAG))
_OTHERS: Mapping[str, Any] = MappingProxyType(
    {
        _NODES: Annotated[
            int | None,
            typer.Option(
                NODES_FLAG,
                help="Number of draft tokens plus one; an error with --draft-tokens. With --draft-width above 1,"
                " --draft-tokens then sets --draft-depth.",
                rich_help_panel=OTHERS,
            ),
        ],
        _CONFIG: Annotated[
            str | None,
            typer.Option(
                SPECULATIVE_FLAG,
                help=f"{', '.join(map(_flag_of, SPECULATIVE_KEYS.values()))} as JSON: {', '.join(SPECULATIVE_KEYS)}."
                " An error for what a flag sets too.",
                rich_help_panel=OTHERS,
            ),
        ],
        "always": Annotated[
            bool | None, typer.Option(*ALWAYS, help="Accepted without effect: always on.", rich_help_panel=OTHERS)
        ],
    }
)
"""Parameter name -> flag of other engines that sets several settings, or that needs a
conversion."""
_CONSTANTS: Mapping[str, tuple[str, object, str]] = MappingProxyType(
    {f"{name}_{value}": (name, value, flags[0]) for (name, value), flags in CONSTANTS.items()}
)
"""Parameter name -> setting, value and first name of a flag that stands for that value."""


def with_settings(function: Callable[..., None], *records: type[Any]) -> Callable[..., None]:
    """Return a command that has the options of `function` and a flag for each field of `records`.

    `function` must have a parameter `settings`. It receives the flags that the user gave, by name,
    without conversion: `engine_settings` and `split_settings` convert them. Environment variables
    are read later, when the configuration is resolved.
    """
    own = [item for item in inspect.signature(function).parameters.values() if item.name != "settings"]
    known = [
        (item, PARTS[record]) for record in records for item in settings_of(record).values() if item.name != "model"
    ]
    made = {item.name: _flag(item, part) for item, part in known}
    made |= {**_OTHERS, **_constant_flags()} if EngineConfig in records else {}

    def run(**given: Any) -> None:
        settings = {name: given.pop(name) for name in made}
        function(**given, settings={name: value for name, value in settings.items() if value not in (None, [])})

    parameters = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=a) for n, a in made.items()
    ]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {**inspect.get_annotations(function, eval_str=True), **made}
    run.__annotations__.pop("settings", None)
    named = [
        item.replace(annotation=run.__annotations__[item.name], kind=inspect.Parameter.KEYWORD_ONLY) for item in own
    ]
    run.__signature__ = inspect.Signature([*named, *parameters])  # pyright: ignore[reportFunctionMemberAccess]
    return run


def engine_settings(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of EngineConfig among the given flags, with flags and values of other
    engines converted.

    `settings` is what a command of `with_settings` receives. Raises ConfigError if two flags
    contradict each other, if two set the same setting of speculation (also to the same value), and
    for JSON that is invalid or has an unknown key. Values are not checked.
    """
    given = settings or {}
    found = {**split_settings(given, EngineConfig), **_speculative(given)}
    for setting, name_of in (("graph", graph_name), ("dtype", dtype_name)):
        if setting in found:
            found[setting] = name_of(found[setting])
    for parameter, (setting, value, flag) in _CONSTANTS.items():
        if parameter in given and not _agree(found.setdefault(setting, value), value):
            raise ConfigError(
                f"{_written(setting, found[setting])} and {flag} contradict each other", remedy="leave one out"
            )
    return found


def _agree(said: object, value: object) -> bool:
    """Return whether two values of a setting agree: they are equal, or `value` is "on" and `said`
    anything except "off"."""
    return said == value or (value == "on" and said != "off")


def _constant_flags() -> dict[str, Any]:
    return {
        parameter: Annotated[
            bool | None,
            typer.Option(*CONSTANTS[name, value], help=f"The same as {_written(name, value)}.", rich_help_panel=OTHERS),
        ]
        for parameter, (name, value, _) in _CONSTANTS.items()
    }


def _written(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    return f"--{flag} {value}" if isinstance(value, str) else f"--{flag}" if value else f"--no-{flag}"


def _speculative(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of speculation by name, from all flags that set them, our own and those
    of other engines; {} if none was given.

    With --draft-width above 1, NODES_FLAG sets `draft_tokens`, and the other flag for it then sets
    `draft_depth`. Raises ConfigError for JSON that is invalid or has an unknown key, and for a
    setting that two flags give, also if they give the same value. Values are not checked.
    """
    given = [(each, settings[each]) for each in SPECULATIVE_KEYS.values() if each in settings]
    if settings.get("draft_width", 1) > 1 and settings.get(_NODES) is not None:
        # For a tree, other engines count the draft's steps and the nodes.
        given = [("draft_depth" if name == "draft_tokens" else name, value) for name, value in given]
    if (nodes := settings.get(_NODES)) is not None:
        given.append(("draft_tokens", nodes - 1))
    if (text := settings.get(_CONFIG)) is not None:
        given += _read_config(text)
    found = dict(given)
    if len(found) < len(given):
        twice = next(name for index, (name, _) in enumerate(given) if name in dict(given[:index]))
        raise ConfigError(f"{twice} is given by two flags", remedy=f"give --{twice.replace('_', '-')} alone")
    return found | ({"speculative": drafter_name(found["speculative"])} if "speculative" in found else {})


def _read_config(text: str) -> list[tuple[str, Any]]:
    wanted = "an object of " + ", ".join(SPECULATIVE_KEYS)
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{SPECULATIVE_FLAG} is not JSON: {error}", wanted=wanted) from None
    if not isinstance(read, dict):
        raise ConfigError(f"{SPECULATIVE_FLAG} is {text}", wanted=wanted)
    unknown = next((key for key in read if key not in SPECULATIVE_KEYS), None)
    if unknown is not None:
        raise ConfigError(f"{SPECULATIVE_FLAG} has {unknown!r}", wanted=wanted, remedy=f"leave {unknown} out")
    if not isinstance(read.get("method", ""), str):
        raise ConfigError(f"{SPECULATIVE_FLAG} has the method {read['method']!r}", wanted="a name")
    return [(SPECULATIVE_KEYS[key], value) for key, value in read.items()]


def split_settings(settings: Mapping[str, Any], record: type[Any]) -> dict[str, Any]:
    """Return those of the given settings that the configuration class `record` has, with lists as
    tuples; values are not checked."""
    known = settings_of(record)
    return {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items() if n in known}


def flag_names(name: str) -> tuple[str, ...]:
    """Return the flags of the setting `name`, with their hyphens: that of its name first, then
    those of other engines."""
    return (_flag_of(name), *FLAGS.get(name, ()))


def _flag(item: Setting, part: str) -> Any:
    names = flag_names(item.name)
    if item.kind.startswith("bool"):
        names = tuple(f"{each}/--no-{each.removeprefix('--')}" for each in names)
    text = f"{item.help} [{item.variable}]"
    return Annotated[_type_of(item), typer.Option(*names, help=text, show_default=False, rich_help_panel=part)]


def _type_of(item: Setting) -> Any:
    if item.is_memory:
        return str | None
    is_list = item.kind.startswith("tuple[")
    word = item.kind.removeprefix("tuple[")
    found = next(value for start, value in _TYPES if word.startswith(start))
    return list[found] | None if is_list else found | None
