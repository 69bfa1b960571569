"""The engine's configuration: every raw argument is read once, here, into a frozen record."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from sglcore.device.errors import ConfigError

PREFIX = "SGLCORE_"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What was asked for; None means "choose, and say why in the ledger".

    `model` is a checkpoint folder (None: the embedded model). `kv_cache_memory` is in bytes, or text such as "512M".
    `max_batch_tokens` bounds one step: longer prompts are cut into chunks of it. `graph` is a graph kind, "off", or "auto".
    `graph_buckets` are the batch sizes of decode graphs, `graph_token_buckets` the token counts of prefill graphs (none:
    dense enough that no prompt is padded to more than twice its tokens).
    `overlap`: plan a step while the one before is still running. `poison` overwrites the input buffers before every step,
    to prove that nothing reads what an older one left. `eager_input_no_copy` runs batches that are on the device already
    as they are. `kernels`: "reference" computes with the reference's functions, to compare numbers. `shadow`: every Nth
    replay of a graph also runs eagerly and is compared (0: never). `system_root` is where probes look for the machine's
    files; None is `/`.
    """

    model: str | None = None
    device: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_requests: int = 256
    max_batch_tokens: int = 2048
    page_size: int | None = None
    kv_cache_memory: int | None = None
    attention_backend: str | None = None
    graph: str = "auto"
    graph_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    graph_token_buckets: tuple[int, ...] = ()
    overlap: bool | None = None
    prefix_cache: bool = True
    strict: bool = False
    threads: int | None = None
    poison: bool = False
    eager_input_no_copy: bool = False
    kernels: str = "auto"
    shadow: int = 0
    system_root: str | None = None
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_requests", "max_batch_tokens", "page_size", "kv_cache_memory", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1. Give a positive number or leave it out.")


_UNITS = MappingProxyType({"K": 10, "M": 20, "G": 30, "T": 40})


def resolve_config(given: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> EngineConfig:
    """Merge explicit arguments with `SGLCORE_*` variables (arguments win; an empty variable is none).

    Unknown names and values of another kind are errors that say what is known or wanted.
    """
    known = {item.name: str(item.type) for item in fields(EngineConfig) if item.name != "sources"}
    values = {name: value for name, value in given.items() if value is not None}
    _refuse_unknown("setting", values, known)
    variables = {name.removeprefix(PREFIX).lower(): text for name, text in environ.items() if name.startswith(PREFIX)}
    _refuse_unknown(
        "variable", [f"{PREFIX}{name.upper()}" for name in variables], [f"{PREFIX}{n.upper()}" for n in known]
    )
    sources = dict.fromkeys(values, "argument")
    checked = {name: _checked(name, value, known[name]) for name, value in values.items()}
    for name, text in variables.items():
        if name not in values and text:
            sources[name] = f"{PREFIX}{name.upper()}"
            checked[name] = _parsed(sources[name], text, known[name])
    return replace(EngineConfig(**checked), sources=MappingProxyType(sources))


def _refuse_unknown(what: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in sorted(set(names) - set(known)):
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ConfigError(f"unknown {what} {name}", remedy=hint)


def _checked(name: str, value: object, kind: str) -> Any:
    """A value given by name, of the declared kind."""
    if name == "kv_cache_memory" and isinstance(value, str):
        return memory_bytes(name, value)
    if kind.startswith("bool"):
        fits = isinstance(value, bool)
    elif kind.startswith("tuple"):
        fits = isinstance(value, (tuple, list)) and all(_is_integer(item) for item in value)
        value = tuple(value) if fits and isinstance(value, (tuple, list)) else value
    elif kind.startswith("int"):
        fits = _is_integer(value)
    else:
        fits = isinstance(value, (str, os.PathLike))
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not fits:
        raise ConfigError(f"{name} is {value!r}", wanted=kind.replace(" | None", ""), remedy=f"correct {name}")
    return value


def _parsed(variable: str, text: str, kind: str) -> Any:
    """The value of a variable, of the declared kind."""
    if variable == f"{PREFIX}KV_CACHE_MEMORY":
        return memory_bytes(variable, text)
    if kind.startswith("bool"):
        if text.lower() not in ("0", "1", "true", "false"):
            raise ConfigError(f"{variable} is {text!r}", wanted="0 or 1")
        return text.lower() in ("1", "true")
    try:
        if kind.startswith("tuple"):
            return tuple(int(part) for part in text.split(","))
        return int(text) if kind.startswith("int") else text
    except ValueError:
        raise ConfigError(f"{variable} is {text!r}", wanted=kind.replace(" | None", "")) from None


def memory_bytes(name: str, text: str) -> int:
    """Bytes of a size such as 512M, 4G or 1073741824; raises ConfigError for anything else."""
    shift = _UNITS.get(text[-1:].upper())
    try:
        number = float(text[:-1]) * (1 << shift) if shift else float(text)
        return int(number)
    except (ValueError, OverflowError):
        raise ConfigError(f"{name} is {text!r}", wanted="a size such as 512M, 4G or 1073741824") from None


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
